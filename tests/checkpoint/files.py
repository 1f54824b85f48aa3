"""Writes small safetensors files by hand, right and wrong ones."""

import json
import struct
from pathlib import Path
from typing import Any


def header_bytes(table: dict[str, Any]) -> bytes:
    """Return the length and the text of a header."""
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, table: dict[str, Any], data: bytes) -> Path:
    """Write one safetensors file with any header in front of any data."""
    path.write_bytes(header_bytes(table) + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """Describe one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TABLE = {
    "a": entry("F32", [2, 3], 0, 24),
    "b": entry("BF16", [4], 24, 32),
    "empty": entry("I8", [0, 5], 32, 32),
    "scalar": entry("F32", [], 32, 36),
}
DATA = bytes(range(36))
