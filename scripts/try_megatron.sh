#!/usr/bin/env bash
# Tries the hooks on a Megatron-LM checkout through its own pretrain_gpt.py, on the CPU: without
# failures and with kills, against plain Megatron; evaluation, TensorBoard, checkpoints both ways.
#   scripts/try_megatron.sh /path/to/Megatron-LM           # about 5 minutes on 2 cores
#   scripts/try_megatron.sh /path/to/Megatron-LM --all     # every training test and combination
# Ends with one line for the table in patches/README.md; the exit code is pytest's.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ $# -lt 1 ] || [ ! -f "$1/pretrain_gpt.py" ]; then
  echo "try_megatron: expected a Megatron-LM checkout with a pretrain_gpt.py, got '${1:-}'" >&2
  exit 2
fi
MEGATRON_LM_PATH=$(cd "$1" && pwd)
export MEGATRON_LM_PATH
# What pretrain_gpt.py imports unguarded.
python -m pip install --quiet six regex pyyaml pydantic einops
python scripts/check_flags.py "$MEGATRON_LM_PATH" || echo "try_megatron: judge these flags first" >&2
wanted="without_failures or middle_of or until_one_is_left or evaluation or tensorboard or both_ways
 or interleaved or bias or gathering"
[ "${2:-}" = --all ] && wanted="pretrain_gpt"
version=$(cd "$MEGATRON_LM_PATH" && python -c 'import importlib.util as u
s = u.spec_from_file_location("info", "megatron/core/package_info.py")
m = u.module_from_spec(s); s.loader.exec_module(m); print(m.__version__)')
results=$(mktemp)
status=0
python -m pytest tests/test_training.py tests/test_combinations.py \
  -k "pretrain_gpt and (${wanted//$'\n'/})" 2>&1 | tee "$results" || status=$?
echo "try_megatron: core_v$version, $(date +%F), commit $(git rev-parse --short HEAD):" \
  "$(tail -1 "$results" | tr -d '=')"
rm -f "$results"
exit "$status"
