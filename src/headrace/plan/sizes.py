"""Numbers as people write them, and as the planner shows them."""

import re
from decimal import ROUND_HALF_UP, Decimal

from headrace.core.errors import UserError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGTP]?)(I?)B?(?:/S)?", re.ASCII)
_MAX_BYTES = 2**63


def parse_size(text: str, name: str) -> int:
    """Read a number of bytes: `1000000`, `64GiB`, `1.5TB`, `460GB/s` (a rate is read the same way).

    Args:
        text: what was given; `k` is 1,000 and `Ki` 1,024, in any case.
        name: the option, for the refusal.

    Raises:
        UserError: it is not such a number, or out of range.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    if found and (found[2] or not found[3]):
        size = int(Decimal(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]])
        if 1 <= size < _MAX_BYTES:
            return size
    raise UserError(
        f"{name} is {text[:60]!r}; a number of bytes is accepted, with or without a unit: 64GiB, 1.5TB, 460GB/s.",
        param=name.lstrip("-"),
    )


def rounded(value: float, decimals: int) -> str:
    """Return a number with a fixed count of decimals, halves away from zero, thousands separated.

    Numerics: Python's own formatting rounds exact halves to even (111.25 to 111.2), readers and reports do not.
    """
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP):,}"


def gigabytes(count: float) -> str:
    """Show bytes in decimal units, as memory and disks are sold."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{rounded(count / size, 2)} {unit}"
    return f"{rounded(count, 0 if float(count).is_integer() else 2)} B"


def gibibytes(count: float) -> str:
    """Show bytes in binary units, as the reports count contexts."""
    for size, unit, digits in ((2**40, "TiB", 2), (2**30, "GiB", 3), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if count >= size:
            return f"{rounded(count / size, digits)} {unit}"
    return f"{rounded(count, 0)} B"
