"""Sizes as people write them."""

import pytest

from headrace.core.errors import UserError
from headrace.plan.sizes import gibibytes, gigabytes, parse_size, rounded


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000000", 10**6),
        ("64GiB", 64 * 2**30),
        ("64 GiB", 64 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("1.5t", 1_500_000_000_000),
        ("460GB/s", 460 * 10**9),
        ("2kib", 2048),
        ("7b", 7),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "GB", "1e9", "5iB", "5XB", "1,5GB", "99999999PB", "٣GB", "1.GB", "inf"]
)
def test_anything_else_is_refused_with_the_option_and_the_value(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_size(text, "--memory")
    assert refusal.value.message.startswith(f"--memory is {text!r};")
    assert refusal.value.param == "memory"


def test_halves_are_rounded_away_from_zero() -> None:
    assert rounded(111.25, 1) == "111.3"
    assert rounded(-0.125, 2) == "-0.13"
    assert rounded(389_120.0, 0) == "389,120"


def test_sizes_are_shown_in_both_kinds_of_units() -> None:
    assert gigabytes(202_758_032_400) == "202.76 GB"
    assert gigabytes(999) == "999 B"
    assert gibibytes(131_072 * 890) == "111.3 MiB"
    assert gibibytes(32 * 933_232_640) == "27.813 GiB"
