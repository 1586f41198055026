#!/usr/bin/env bash
# The whole test suite. Arguments go to pytest: scripts/test.sh -k machine
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python -m pytest "$@"
