"""Writes the text that headrace-nano is judged on: files of the packages that its recipe holds out, one a line.

Run as `python scripts/nano_held_out.py OUT [BYTES]` where headrace and `scripts/nano-packages.txt` are installed; at
most 400,000 bytes by default. Put it beside the shipped weights as `HELD_OUT_NAME` of `headrace.core.shipped`.
"""

import sys
from pathlib import Path

from headrace.evaluate.held_out import held_out_lines
from headrace.train.data.corpus import collect, package_sources
from headrace.train.recipes.nano import HELD_OUT

MAX_BYTES = 400_000


def main() -> None:
    """Write the file named on the command line."""
    out, max_bytes = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else MAX_BYTES
    corpus = collect(package_sources(HELD_OUT))
    licences = {record.source: record.licence.name for record in corpus.records}
    lines = list(held_out_lines(corpus.documents, licences, max_bytes))
    out.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{out}: {len(lines)} documents, {out.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
