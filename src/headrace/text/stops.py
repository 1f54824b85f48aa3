"""Finds stop strings in streamed text, also across token borders, and holds back what might become one."""

from collections.abc import Sequence

from headrace.core.errors import UserError


class StopChecker:
    """Owns the tail of one stream that may be the beginning of a stop string.

    The stop string that is complete first wins; of two that end together, the one that begins first. So the result is
    what reading character by character gives, however the text is cut into pieces.

    Attributes:
        matched: the stop string that ended the stream, None while none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Start a stream.

        Args:
            stops: the stop strings; may be none.

        Raises:
            UserError: a stop string is empty or not a string.
        """
        if isinstance(stops, str):
            raise UserError(f"stop strings must be a list, not the single string {stops!r}", param="stop")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise UserError(
                    f"stop string {stop!r} is not accepted; it must be text of one or more characters", "stop"
                )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text and return what is safe to show, and whether a stop string was met.

        Text after (and including) the stop string is dropped; once stopped, everything is.

        Returns:
            (text that belongs to no stop string, whether the stream has stopped).

        State: advances the stream.
        """
        if self.matched is not None:
            return "", True
        buffer = self._held + text
        # (end, start): the earliest end first, then the earliest start
        found = min(
            ((start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            _, start, self.matched = found
            self._held = ""
            return buffer[:start], True
        safe_len = len(buffer) - max((_overlap_len(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[safe_len:]
        return buffer[:safe_len], False

    def flush(self) -> str:
        """End the stream and return the text held back; no stop string can come any more.

        State: nothing is held afterwards.
        """
        rest, self._held = self._held, ""
        return rest


def _overlap_len(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
