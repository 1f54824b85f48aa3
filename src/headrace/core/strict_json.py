"""JSON as headrace accepts it: UTF-8, no key twice, no NaN or infinity, bounded size and depth.

Python's own reader keeps the last of two equal keys and accepts `NaN`; a configuration read that way means something
else to every program. Read `models/deepseek_v41/config.py` next.
"""

import json
import math
from pathlib import Path
from typing import Any

from headrace.core.errors import UserError


class _RefusedError(ValueError):
    """A rule of this module was broken; the text names the place."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"the key {key!r} stands twice in one object")
            seen.add(key)
    return result


def _no_constant(text: str) -> float:
    raise _RefusedError(f"{text} is not a number JSON knows")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {text[:40]} is too large")
    return value


def parse_json(text: bytes, where: str, error: type[UserError] = UserError) -> Any:
    """Parse one JSON document.

    Args:
        text: the document, UTF-8.
        where: how to name the document in a refusal.
        error: the class to raise.

    Raises:
        UserError: (or `error`) the text is not UTF-8 or not JSON, a key stands twice, or a number is NaN or infinite.
    """
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except UnicodeDecodeError as problem:
        raise error(f"{where} is not UTF-8 text: byte {problem.start} cannot be decoded.") from None
    except RecursionError:
        raise error(f"{where} is nested too deeply to be read.") from None
    except ValueError as problem:
        raise error(f"{where} is not valid JSON: {problem}.") from None


def read_json(path: Path, *, max_bytes: int, error: type[UserError] = UserError) -> Any:
    """Read one JSON file of at most `max_bytes` bytes.

    Raises:
        UserError: (or `error`) the file is missing, unreadable, too long, or refused by `parse_json`.
    """
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise error(f"{path} is {kind}; a JSON file is accepted.")
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}.") from None
    if len(text) > max_bytes:
        raise error(f"{path} is longer than the {max_bytes:,} bytes such a file may have.")
    return parse_json(text, str(path), error)
