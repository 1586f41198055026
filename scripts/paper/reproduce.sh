#!/usr/bin/env bash
# The paper's curves and tables, made here: runs/paper/index.html, with CSVs and PNGs beside it.
# 64 minutes on 2 cores, on a machine that does nothing else; --quick: some minutes. Root gives each rank a fixed share of a core.
#   scripts/paper/reproduce.sh [--quick] [--only curve,failures,cost,simulated] [--out DIR] [--docs]
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
exec python scripts/paper/reproduce.py "$@"
