"""Turns ids into text one at a time, never showing half a character and never taking back what was shown.

The pieces joined are exactly what the tokenizer makes of all ids at once, whatever its decoder: leading spaces, word
pieces, bytes spread over tokens, bytes that are no UTF-8. Read `text/tokenizer.py` before, `text/stops.py` after.
"""

from typing import Any

from headrace.core.errors import UserError
from headrace.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A token's text depends on whether another token stands before it, and on the bytes of a character begun before it (at
# most three). So a few ids of context reproduce it, and the cost per token does not grow with the text.
_CONTEXT_IDS = 6
_WINDOW_IDS = 24


class Detokenizer:
    """Owns the stream of one sequence: a window of its newest ids and how much of their text was handed out.

    Invariant: everything handed out so far is a prefix of the text of all ids so far, and stays one.

    Text is handed out as soon as it cannot change. What must wait: the bytes of an unfinished character; with a
    byte-fallback decoder a whole run of byte tokens, because one bad byte turns the entire run into U+FFFD; and with a
    decoder that rewrites text across tokens (a pattern replaced after joining) everything until `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        """Start an empty stream.

        Args:
            tokenizer: the vocabulary and decoder of the ids.
            skip_special_tokens: leave special tokens out of the text.
        """
        stages = tokenizer.decoder_stages()
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._has_byte_tokens = any(stage["type"] == "ByteFallback" for stage in stages)
        self._is_streamable = _is_streamable(stages)
        self._ids: list[int] = []
        self._shown_len = 0  # characters of the window's text that were handed out

    def push(self, token_id: int) -> str:
        """Add one id and return the text that became certain, often '' in the middle of a character.

        Raises:
            UserError: the id is not in the vocabulary.

        State: advances the stream.
        """
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            raise UserError(
                f"token id {token_id} is not in the tokenizer's vocabulary; "
                f"accepted are 0 to {self._tokenizer.size - 1}",
                param="token_ids",
            )
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        if not self._is_streamable or (self._has_byte_tokens and _is_byte_token(token)):
            return ""
        text = self._decode(self._ids)
        # only the last U+FFFD can still become a character: an earlier one is followed by bytes that ruled it out
        certain_len = max(self._shown_len, len(text) - text.endswith(_REPLACEMENT))
        piece = text[self._shown_len : certain_len]
        self._shown_len = certain_len
        if len(self._ids) > _WINDOW_IDS:
            self._shorten_window(text)
        return piece

    def flush(self) -> str:
        """End the stream and return what was held back; an unfinished character becomes U+FFFD.

        State: the stream is empty afterwards and may be used for another text.
        """
        rest = self._decode(self._ids)[self._shown_len :]
        self._ids, self._shown_len = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_checked(ids, self._skips_special)

    def _shorten_window(self, text: str) -> None:
        held_len = len(text) - self._shown_len
        num_ids = _CONTEXT_IDS
        while num_ids < len(self._ids):
            context = self._ids[-num_ids:]
            context_text = self._decode(context)
            # what a decoder strips from the start of a text is used up once the context shows any text at all
            if len(context_text) > held_len:
                self._ids, self._shown_len = context, len(context_text) - held_len
                return
            num_ids *= 2


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_streamable(stages: list[dict[str, Any]]) -> bool:
    """Return whether later ids leave earlier text alone, apart from unfinished characters and runs of byte tokens."""
    is_joined = False
    for stage in stages:
        kind = stage["type"]
        if kind in {"Fuse", "ByteLevel"}:
            is_joined = True
        elif kind == "Replace":
            if is_joined and len(stage["pattern"].get("String", "")) != 1:
                return False
        elif kind in {"ByteFallback", "WordPiece", "BPEDecoder", "CTC"}:
            if is_joined:
                return False
        elif kind == "Strip":
            if is_joined and stage["stop"]:
                return False
        elif kind != "Metaspace":
            return False
    return True
