"""One event of a server-sent stream, and the bytes it becomes."""

import json
from typing import Any

Frame = tuple[str | None, str]
"""An event's name, if it has one, and its data."""


def to_json(value: Any) -> str:
    """Return compact JSON, letters of every script as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def to_bytes(frame: Frame) -> bytes:
    """Return the bytes of an event; half characters, which no JSON text should hold, become question marks."""
    name, data = frame
    head = f"event: {name}\n" if name is not None else ""
    if "\n" in data or "\r" in data:
        lines = "".join(f"data: {line}\n" for line in data.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
        return f"{head}{lines}\n".encode("utf-8", "replace")
    return f"{head}data: {data}\n\n".encode("utf-8", "replace")


def comment(text: str) -> bytes:
    """Return the bytes of a comment, which clients skip."""
    return f": {text}\n\n".encode("utf-8", "replace")
