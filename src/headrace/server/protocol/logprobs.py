"""Log-probabilities of an answer's text, as the OpenAI dialects write them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.core.events import TokenEvent
    from headrace.text.tokenizer import Tokenizer


class Logprobs:
    """Owns the entries of one answer, and which of them no event has carried yet.

    Attributes:
        content, reasoning: entries of all tokens so far.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.reasoning: list[dict[str, Any]] = []
        self._told = [0, 0]

    def add(self, event: "TokenEvent", tokenizer: "Tokenizer", *, is_reasoning: bool) -> None:
        """Add the entry of a token."""
        entry = _entry(event.token_id or 0, event.logprob or 0.0, tokenizer)
        entry["top_logprobs"] = [_entry(token_id, value, tokenizer) for token_id, value in event.top_logprobs]
        (self.reasoning if is_reasoning else self.content).append(entry)

    def take_content(self) -> list[dict[str, Any]]:
        """Return entries of content that were not taken before."""
        found = self.content[self._told[0] :]
        self._told[0] = len(self.content)
        return found

    def take_reasoning(self) -> list[dict[str, Any]]:
        """Return entries of reasoning that were not taken before."""
        found = self.reasoning[self._told[1] :]
        self._told[1] = len(self.reasoning)
        return found


def _entry(token_id: int, logprob: float, tokenizer: "Tokenizer") -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    try:
        text = data.decode()
    except UnicodeDecodeError:  # part of a character
        text = "".join(f"\\x{byte:02x}" for byte in data)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}
