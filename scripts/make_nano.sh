#!/usr/bin/env bash
# Makes headrace-nano again: fetches its text, trains the backbone, then the draft layers on it. About three hours on one core.
# Usage: scripts/make_nano.sh FOLDER. A run that was interrupted goes on when the script is started again.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
cd "$1"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -x venv/bin/headrace ]; then
    python3 -m venv venv
    venv/bin/pip install --quiet -c "$root/constraints.txt" "$root"
    venv/bin/pip install --quiet --no-deps -r "$root/scripts/nano-packages.txt"
fi
[ -d nano-docs ] || venv/bin/python "$root/scripts/nano_docs.py" nano-docs
resume=()
[ ! -d backbone ] || resume=(--resume)
venv/bin/headrace train nano --out backbone "${resume[@]}"
resume=()
[ ! -d drafts ] || resume=(--resume)
venv/bin/headrace train nano-draft --backbone backbone --out drafts "${resume[@]}"
