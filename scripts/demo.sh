#!/usr/bin/env bash
# The demo: trains a small LLaMA-style GPT on real text without failures and again while replicas
# are killed, and compares. See scripts/demo.py.
#   scripts/demo.sh [--quick] [--out DIR]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python scripts/demo.py "$@"
