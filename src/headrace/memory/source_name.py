"""The names of the ways to read n-gram tables, and of where their scales lie. Does not load torch."""

from typing import Literal

SourceName = Literal["memory", "mmap", "read"]
SOURCE_NAMES: tuple[SourceName, ...] = ("memory", "mmap", "read")
ScalesName = Literal["memory", "file"]
SCALES_NAMES: tuple[ScalesName, ...] = ("memory", "file")
