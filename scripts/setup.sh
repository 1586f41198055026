#!/usr/bin/env bash
# Makes .venv with the pinned dependencies of setup.py, once; sourced by the other scripts.
# After it, PATH begins with .venv/bin. Needs Python 3.11 or later; installs nothing outside .venv
# but Debian's python3-venv, if that is missing and this is root.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: Python 3.11 or later is needed; install it (Debian: apt-get install python3)" >&2
  return 1
}

make_venv() {
  local python
  python=$(find_python)
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq && apt-get install -y -qq python3-venv >&2
    else
      echo "setup: Python's venv is missing; run: sudo apt-get install python3-venv" >&2
      return 1
    fi
  fi
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade pip
}

# The stamp holds what was installed; a changed setup.py installs again.
stamp=.venv/installed
wanted=$(cksum <setup.py)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "setup: installing into .venv (about a minute where torch is a CPU build)" >&2
  [ -x .venv/bin/python ] || make_venv
  .venv/bin/python -m pip install --quiet --editable '.[test]' >&2
  echo "$wanted" >"$stamp"
fi
export PATH="$root/.venv/bin:$PATH"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}" # megatron-core warns of each missing GPU package
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"    # many ranks share few cores here
export CUDA_DEVICE_MAX_CONNECTIONS=1              # Megatron asks for it with tensor parallelism
