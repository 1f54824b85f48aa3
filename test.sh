#!/usr/bin/env bash
# Set up headrace and run its tests: bash test.sh [pytest arguments]
# Long checks at promised sizes are left out; `bash test.sh -m full` runs those.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/environment.sh

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest "$@"
