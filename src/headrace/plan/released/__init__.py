"""Configurations that ship with the planner: four released models by name, and two earlier generations for comparison.

The earlier ones hold the keys that the arithmetic needs, transcribed from the published configurations.
"""

from pathlib import Path
from typing import Any

from headrace.core.strict_json import read_json

RELEASED = ("deepseek-v4.1-flash", "deepseek-v4-flash", "deepseek-v4-pro", "qwen3.8-flash-next")
EARLIER = ("deepseek-v3.2", "deepseek-v1-67b")

_FOLDER = Path(__file__).resolve().parent
_MAX_BYTES = 1 << 20


def released_config(name: str) -> dict[str, Any]:
    """Return the configuration of one of `RELEASED` or `EARLIER` as its file holds it."""
    document: dict[str, Any] = read_json(_FOLDER / f"{name}.json", max_bytes=_MAX_BYTES)
    return document
