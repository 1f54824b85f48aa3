#!/usr/bin/env bash
# Set up headrace and generate text: bash run.sh ["a prompt"]
# No trained model ships yet, so this makes a small random checkpoint from configs/tiny.json and runs that: the whole
# path from files to text is real, the words are noise. Folders it writes: .venv/ and build/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/environment.sh

model=build/tiny-$(sha256sum configs/tiny.json | cut -c1-12)
if [ ! -f "$model/config.json" ]; then
    rm -rf "$model.part"
    headrace synth configs/tiny.json --out "$model.part" --seed 1 >/dev/null
    mv "$model.part" "$model"
fi
echo "random weights: expect noise, not sentences" >&2
headrace generate "$model" --prompt "${1:-Water reaches the wheel through the headrace.}" --max-tokens 32
