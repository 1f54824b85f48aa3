"""Writes blocks until it is killed, and tells what is written: `python -m ... DIR FIRST BYTES`."""

import sys
from pathlib import Path

from tests.cache.tiers.faulty import Directory, item


def main() -> None:
    folder, place, max_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    tier = Directory(folder, max_bytes=max_bytes, segment_bytes=64_000).open()
    while True:
        for _ in range(3):
            tier.put(item(place))
            place += 1
        tier.flush()
        sys.stdout.write(f"{place - 1}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
