#!/usr/bin/env bash
# Seeded random ends of replicas of a real training job; one line per seed, a summary line last.
#   scripts/stress.sh [--seeds N] [--first-seed K] [--ends] [--stages N]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python scripts/stress.py "$@"
