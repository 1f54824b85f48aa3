"""The names of the ways to read n-gram tables. Does not load torch."""

from typing import Literal

SourceName = Literal["memory", "mmap", "read"]
SOURCE_NAMES: tuple[SourceName, ...] = ("memory", "mmap", "read")
