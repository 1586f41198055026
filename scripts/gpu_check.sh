#!/usr/bin/env bash
# Checks the GPU path on one GPU in under 10 minutes; says what it could not check.
#   scripts/gpu_check.sh [--platform cpu]     # cpu: rehearse the script itself
# Uses the Python that is there if it has all that is needed, else makes .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if python3 -c 'import torch, megatron.core, mpi4py, numpy, psutil, tokenizers' 2>/dev/null; then
  export PYTHONPATH="$PWD" PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1
  exec python3 scripts/gpu_check.py "$@"
fi
source scripts/setup.sh
exec python scripts/gpu_check.py "$@"
