"""The text of one completion as it grows: deltas for streams, the whole for the rest, log-probabilities for both."""

from collections.abc import Sequence
from typing import Any

from headrace.engine.core.events import TokenEvent
from headrace.engine.result import FinishReason, Result, TokenLogprob
from headrace.server.protocol.patches import cache_of
from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer

_FINISH: dict[FinishReason, str] = {"stop": "stop", "length": "length", "cancelled": "stop", "deadline": "length"}


class Logprobs:
    """Log-probabilities in the shape of the completions dialect, token by token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_id: int, value: float | None, top: Sequence[tuple[int, float]], offset: int) -> None:
        """Add a token that begins `offset` characters into the text."""
        self._tokens.append(token_text(self._tokenizer, token_id))
        self._values.append(value)
        alternatives = {token_text(self._tokenizer, other): logprob for other, logprob in top}
        self._tops.append(alternatives or None)
        self._offsets.append(offset)

    def append(self, other: "Logprobs") -> None:
        """Add what another has."""
        self._tokens += other._tokens
        self._values += other._values
        self._tops += other._tops
        self._offsets += other._offsets

    def take(self) -> dict[str, Any] | None:
        """Return what was added since the last time, None if nothing."""
        if not self._tokens:
            return None
        found = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._values, self._tops, self._offsets = [], [], [], []
        return found


class CompletionText:
    """One choice. `index` is its number in the response."""

    def __init__(self, index: int, tokenizer: Tokenizer | None, *, wants_logprobs: bool, keeps_token: bool) -> None:
        self.index = index
        self.result: Result | None = None
        self._length = 0
        self._parts: list[str] = []
        self._logprobs = Logprobs(tokenizer) if wants_logprobs else None
        self._keeps_token = keeps_token

    def echo(self, text: str) -> None:
        """Begin with the prompt's text."""
        self._parts.append(text)
        self._length += len(text)

    def echo_logprobs(self, tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        """Put the prompt's log-probabilities in front; `ids` are those of the text that is echoed."""
        stream, offset = Detokenizer(tokenizer, skip_special_tokens=True), 0
        before = Logprobs(tokenizer)
        for token_id, entry in zip(ids, entries, strict=True):
            value, top = (None, ()) if entry is None else (entry.logprob, entry.top)
            before.add(token_id, value, top, offset)
            offset += len(stream.push(token_id))
        if self._logprobs is not None:
            before.append(self._logprobs)
            self._logprobs = before

    def add(self, event: TokenEvent) -> None:
        """Take an event of the engine."""
        self.result = event.result or self.result
        if not self._keeps_token:
            return
        if event.token_id is not None and self._logprobs is not None:
            self._logprobs.add(event.token_id, event.logprob, event.top_logprobs, self._length)
        if event.text:
            self._parts.append(event.text)
            self._length += len(event.text)

    def take(self) -> dict[str, Any] | None:
        """Return the choice with what came since the last time, None if nothing did and it goes on."""
        logprobs = self._logprobs.take() if self._logprobs is not None else None
        if not self._parts and logprobs is None and self.result is None:
            return None
        text, self._parts = "".join(self._parts), []
        found: dict[str, Any] = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if self.result is not None:
            found["finish_reason"] = _FINISH[self.result.finish_reason]
            found["stop_reason"] = self.result.stop
            found["seed"] = self.result.seed
            found["cache"] = cache_of(self.result)
        return found


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return a token's text; one that is part of a character is spelled as its bytes in hexadecimal."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
