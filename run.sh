#!/usr/bin/env bash
# Set up headrace and serve the model that ships with it: bash run.sh; the page is at the address that is printed.
# Options are those of headrace serve: bash run.sh --port 8080
# With a prompt it goes on with that instead, and ends: bash run.sh "a prompt" [options of headrace generate]
# The first run installs into .venv/; later runs start at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
HEADRACE_EXTRAS= . scripts/environment.sh

if [ $# -eq 0 ] || [[ $1 == -* ]]; then exec headrace serve "$@"; fi
prompt=$1
shift
exec headrace generate --prompt "$prompt" --max-tokens 160 "$@"
