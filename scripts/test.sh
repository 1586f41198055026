#!/usr/bin/env bash
# The whole test suite. Arguments go to pytest: scripts/test.sh -k machine
# Tests that start jobs or are about seconds run one after the other (tests/conftest.py); a second
# process runs the others meanwhile. -n 0: all in one process, as --pdb and -s need it.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python -m pytest -n 2 --dist loadgroup --durations=10 "$@"
