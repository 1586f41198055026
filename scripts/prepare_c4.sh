#!/usr/bin/env bash
# C4's public files to one of Megatron's indexed datasets: in parallel, resumable.
#   scripts/prepare_c4.sh c4-train.*.json.gz --output-prefix data/c4 --tokenizer tokenizer.json
# --checksums FILE checks the files (sha256sum's format); --workers N; see --help.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec recover-megatron prepare-c4 "$@"
