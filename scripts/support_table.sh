#!/usr/bin/env bash
# Tries every combination of testing/combinations.py and writes the table in README.md.
#   scripts/support_table.sh [/path/to/Megatron-LM]     # about 5 minutes; 15 with a checkout
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ $# -gt 0 ]; then
  MEGATRON_LM_PATH=$(cd "$1" && pwd)
  export MEGATRON_LM_PATH
  shift
fi
exec python scripts/support_table.py --commit "$(git rev-parse --short HEAD)" "$@"
