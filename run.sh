#!/usr/bin/env bash
# Set up headrace and let the model that ships with it answer: bash run.sh ["a prompt" [options of headrace generate]]
# The first run installs into .venv/; later runs start at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
HEADRACE_EXTRAS= . scripts/environment.sh

prompt=${1:-def read_config(path):}
shift || true
exec headrace generate --prompt "$prompt" --max-tokens 160 "$@"
