#!/usr/bin/env bash
# Makes headrace-nano again: fetches its text, trains the backbone, then the draft layers on it, writes the held-out text,
# and gathers what ships in FOLDER/nano. About two and a half hours on one core.
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
[ -f calibration.jsonl ] || venv/bin/python "$root/scripts/nano_held_out.py" held_out.jsonl calibration.jsonl
last=$(find drafts -maxdepth 1 -name 'step-*' | sort | tail -n 1)
mkdir -p nano
cp "$last"/{config.json,model.safetensors,tokenizer.json} held_out.jsonl nano/
venv/bin/headrace calibrate nano --text calibration.jsonl --collect nano/calibration.safetensors \
    --out nano/draft_temperatures.json
echo "headrace-nano is in $PWD/nano; judge it with: headrace evaluate nano $PWD/nano --text $PWD/nano/held_out.jsonl"
