"""A tokenizer as the structure compiler needs it: the bytes of every token, and which tokens are no text.

Built once for a loaded model (about a second for 129,280 tokens) and shared by all requests.
"""

import llguidance
import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.text.tokenizer import Tokenizer

_NUM_BYTES = 256
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


class GrammarVocabulary:
    """Owns the compiler's view of a vocabulary. Immutable; may be shared between threads.

    Attributes:
        size: number of token ids.
        eos_token_id: allowed where a structure is complete, and nowhere else.
        is_text: [size] bool, False for tokens that no structure may produce: special and other added tokens, and ids
            without a token.
        compiler_view: the library's object.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        """Take over a vocabulary.

        Raises:
            UserError: it is not a byte-level one, or has no such end of sequence.
        """
        if not any(stage["type"] == "ByteLevel" for stage in tokenizer.decoder_stages()):
            raise UserError(
                "structured output needs a byte-level tokenizer, and this checkpoint has one of another kind",
                param="structured",
            )
        if not 0 <= eos_token_id < tokenizer.size:
            raise UserError(
                f"structured output needs an end-of-sequence token, and id {eos_token_id} is not in the tokenizer",
                param="structured",
            )
        self.size, self.eos_token_id = tokenizer.size, eos_token_id
        tokens, is_text = _token_bytes(tokenizer, eos_token_id)
        self.is_text: NDArray[np.bool_] = is_text
        self.compiler_view = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Described(tokenizer, tokens, is_text, eos_token_id)),
            n_vocab=tokenizer.size,
            eos_token=eos_token_id,
        )
        self._added = {tokenizer.id_to_token(token_id): token_id for token_id in tokenizer.added_ids}

    def special_id(self, token: str) -> int:
        """Return the id of a special token by its spelling.

        Raises:
            UserError: the tokenizer adds no such token.
        """
        token_id = self._added.get(token)
        if token_id is None:
            raise UserError(f"the structure needs the token {token!r}, which the tokenizer has not", param="structured")
        return token_id


class _Described:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], is_text: NDArray[np.bool_], eos_token_id: int
    ) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids: list[int] = [int(i) for i in np.flatnonzero(~is_text) if tokens[i]]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _token_bytes(tokenizer: Tokenizer, eos_token_id: int) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Return the bytes of every id, and whether it is text."""
    byte_of = _byte_of_character()
    added = tokenizer.added_ids
    tokens: list[bytes] = []
    is_text = np.zeros(tokenizer.size, dtype=np.bool_)
    for token_id in range(tokenizer.size):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            tokens.append(b"")
        elif token_id == eos_token_id or token_id in added or not token or not set(token) <= byte_of.keys():
            tokens.append(token.encode())
        else:
            tokens.append(bytes(byte_of[character] for character in token))
            is_text[token_id] = True
    return tokens, is_text


def _byte_of_character() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable ones are themselves, others move up."""
    table = {chr(byte): byte for byte in _PRINTABLE}
    moved = (byte for byte in range(_NUM_BYTES) if byte not in _PRINTABLE)
    return table | {chr(_NUM_BYTES + place): byte for place, byte in enumerate(moved)}
