"""A rendered prompt in pieces: special tokens and the text between them, and the ids of both."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder

if TYPE_CHECKING:
    from deepseek_recipe import RenderedPrompt

    from headrace.text.tokenizer import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
MARKER = "｜DSML｜"
_NEEDED = (BOS, EOS, "<｜System｜>", "<｜User｜>", ASSISTANT, THINK, THINK_END, MARKER)
_SHOWN = (THINK, THINK_END, MARKER)


@dataclass(frozen=True)
class Segment:
    """Text of a prompt: the spelling of one special token, or plain text in which nothing is special."""

    text: str
    is_special: bool


def split(rendered: "RenderedPrompt") -> list[Segment]:
    """Return a rendered prompt in pieces."""
    text, done = rendered.prompt, 0
    segments: list[Segment] = []
    for start, stop in rendered.special_ranges:
        if start > done:
            segments.append(Segment(text[done:start], is_special=False))
        segments.append(Segment(text[start:stop], is_special=True))
        done = stop
    if done < len(text):
        segments.append(Segment(text[done:], is_special=False))
    return segments


class ChatTokens:
    """The special tokens of a checkpoint's vocabulary, and its plain text. Immutable; may be shared between threads."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Take over a tokenizer.

        Raises:
            UserError: it lacks a token that conversations are made of, or hides one that answers are read by.
        """
        self._tokenizer = tokenizer
        missing = [token for token in _NEEDED if tokenizer.token_to_id(token) not in tokenizer.added_ids]
        hidden = [token for token in _SHOWN if tokenizer.is_special(tokenizer.token_to_id(token) or 0)]
        if missing or hidden:
            name = (missing or hidden)[0]
            what = "has no token" if missing else "leaves out of texts the token"
            raise UserError(
                f"this model's tokenizer {what} {name!r}, so it takes no conversations; accepted are prompts"
            )
        self._encoder = Encoder(tokenizer.document())
        self.eos, self.think, self.think_end = (self.special(token) for token in (EOS, THINK, THINK_END))
        self.assistant, self.marker = self.special(ASSISTANT), self.special(MARKER)

    def special(self, token: str) -> int:
        """Return the id of a special token.

        Raises:
            UserError: the vocabulary has none of that spelling.
        """
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise UserError(f"this model's tokenizer has no token {token!r}, which the conversation needs")
        return token_id

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is special."""
        return self._encoder.plain([text])[0] if text else []

    def ids(self, segments: list[Segment]) -> list[int]:
        """Return the ids of a prompt in pieces."""
        found: list[int] = []
        for segment in segments:
            if segment.is_special:
                found.append(self.special(segment.text))
            else:
                found += self.plain(segment.text)
        return found

    def text(self, ids: list[int]) -> str:
        """Return the text of ids, as answers show it."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
