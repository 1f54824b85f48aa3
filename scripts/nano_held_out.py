"""Writes the text that headrace-nano is judged on: files of the packages that its recipe holds out, one a line.

Run as `python scripts/nano_held_out.py OUT [REST]` where headrace and `scripts/nano-packages.txt` are installed. OUT,
at most 400,000 bytes, goes beside the shipped weights as `HELD_OUT_NAME` of `headrace.core.shipped`. REST gets the
other files of these packages, of long ones the beginning: the draft's confidences are fitted to it (`headrace calibrate
--text REST`), so that they can be judged on OUT.
"""

import json
import sys
from pathlib import Path

from headrace.evaluate.held_out import held_out_lines
from headrace.train.data.corpus import collect, package_sources
from headrace.train.recipes.nano import HELD_OUT

MAX_BYTES = 400_000
REST_CHARACTERS = 16_000  # of one document


def main() -> None:
    """Write the files named on the command line."""
    corpus = collect(package_sources(HELD_OUT))
    licences = {record.source: record.licence.name for record in corpus.records}
    lines = list(held_out_lines(corpus.documents, licences, MAX_BYTES))
    taken = {json.loads(line)["name"] for line in lines}
    others = [one._replace(text=one.text[:REST_CHARACTERS]) for one in corpus.documents if one.name not in taken]
    rest = held_out_lines(others, licences, sys.maxsize)
    for name, content in zip(sys.argv[1:], (lines, rest), strict=False):
        out = Path(name)
        written = list(content)
        out.write_text("".join(written), encoding="utf-8")
        sys.stdout.write(f"{out}: {len(written)} documents, {out.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
