"""Tells markers of tool calls that mean something from those that are only text, before the parser sees them.

The package's parser takes every marker for its own: text behind a broken opening is lost, and so is what follows a
look-alike of a closing tag inside an argument. `Markup` passes answers on piece by piece and spells the marker in a
private way where it opens, names or closes a call; all others stay text. It reads no calls itself.
"""

import secrets
from typing import Literal

from headrace.server.protocol.segments import MARKER

PRIVATE = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
"""The marker as the parser is told it is spelled; no text holds it by chance."""

_OPEN, _CLOSE = f"<{MARKER}", f"</{MARKER}"
_STYLES = (" ", "", "_")
_MAX_NAME = 256
_MAX_BLOCK_NAME = 24
_Fit = Literal["yes", "no", "perhaps"]


class Markup:
    """Owns the end of one answer that may become a marker, and where the answer stands.

    State: outside of calls, in a block or call (between tags), or in the value of a parameter.
    """

    def __init__(self, *, is_opened: bool = False) -> None:
        """Start an answer, inside a block where the prompt opened one."""
        self._state: Literal["text", "block", "value"] = "block" if is_opened else "text"
        self._style = ""
        self._held = ""

    @property
    def is_text(self) -> bool:
        """Whether what was passed on last belongs to no call."""
        return self._state == "text"

    def push(self, text: str) -> str:
        """Take text and return what can be passed on."""
        self._held += text
        passed: list[str] = []
        while self._held:
            step = self._step()
            if step is None:
                break
            passed.append(step)
        return "".join(passed)

    def flush(self) -> str:
        """End the answer and return what was held back, as text."""
        rest, self._held = self._held, ""
        return rest

    def _step(self) -> str | None:
        """Pass one piece on; None where more must come first."""
        tags = {"text": (_OPEN,), "block": (_OPEN, _CLOSE), "value": (_CLOSE,)}[self._state]
        found = min((place for tag in tags if (place := self._held.find(tag)) >= 0), default=None)
        if found is None:
            safe = len(self._held) - max(_overlap(self._held, tag) for tag in tags)
            return self._take(safe) if safe else None
        if found:
            return self._take(found)
        return self._at_marker()

    def _at_marker(self) -> str | None:
        """The held text begins with a marker: decide what it is."""
        if self._state == "text":
            fit, size = _opening(self._held)
            if fit == "yes":
                self._state = "block"
                return self._take(size).replace(MARKER, PRIVATE)
            return None if fit == "perhaps" else self._take(len(_OPEN))
        end = self._held.find(">")
        if self._state == "block":
            if end < 0:
                return None if len(self._held) < 2 * _MAX_NAME else self._take(len(self._held))
            tag = self._take(end + 1)
            self._enter(tag)
            return tag.replace(MARKER, PRIVATE, 1)
        closing = f"{_CLOSE}{self._style}parameter>"
        if self._held.startswith(closing):
            self._state = "block"
            return self._take(len(closing)).replace(MARKER, PRIVATE)
        return None if closing.startswith(self._held) else self._take(len(_CLOSE))

    def _enter(self, tag: str) -> None:
        for style in _STYLES:
            if tag.startswith(f"{_OPEN}{style}parameter "):
                self._state, self._style = "value", style

    def _take(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        return piece


def _opening(text: str) -> tuple[_Fit, int]:
    """Return whether a text begins with the opening of a block and of its first call, and how long that is.

    The block may have any name, since the call behind it says what it is.
    """
    end = text.find(">", len(_OPEN))
    name = text[len(_OPEN) : end if end >= 0 else None]
    if len(name) > _MAX_BLOCK_NAME or "<" in name or "\n" in name:
        return "no", 0
    if end < 0:
        return "perhaps", 0
    rest = text[end + 1 :].lstrip()
    fit, size = _call(rest)
    return fit, len(text) - len(rest) + size


def _call(text: str) -> tuple[_Fit, int]:
    is_open = False
    for style in _STYLES:
        head = f'{_OPEN}{style}invoke name="'
        if text.startswith(head):
            end = text.find('">', len(head))
            if end >= 0:
                return ("yes" if end - len(head) <= _MAX_NAME else "no"), end + 2
            return ("perhaps" if len(text) - len(head) <= _MAX_NAME else "no"), 0
        is_open = is_open or head.startswith(text)
    return ("perhaps" if is_open else "no"), 0


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
