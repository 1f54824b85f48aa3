"""Trains a byte-level vocabulary and encodes training text with it.

Beside `text/tokenizer.py`, which serves any finished file. Training needs two things that serving must not do: text in
which a special token is spelled out stays plain text, and ids come with the characters they start at.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from headrace.core.errors import UserError

NUM_BYTES = 256

# Digits alone; then the pieces of the released vocabulary: a mark with the word it leads, words with one space in
# front, marks with the line ends behind them, line ends, blanks. No piece reaches past the end of a line, except that
# line ends in a row stay together.
_DIGIT = r"\p{N}"
_EAST_ASIAN = r"[一-龥぀-ゟ゠-ヿ]+"
_PIECE = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_MAX_TOKEN_CHARACTERS = 32  # longer ones are rules of dashes and blanks, which code holds in every length


class Encoded(NamedTuple):
    """Ids of a text and the character each one starts at."""

    ids: list[int]
    starts: list[int]


def train_document(texts: Iterable[str], size: int, special_tokens: Sequence[str]) -> dict[str, Any]:
    """Train a byte-level BPE vocabulary and return the document of its `tokenizer.json`.

    Ids: the special tokens in their order, then the 256 bytes, then merges, the most frequent first. The same texts
    give the same document, whatever the number of threads.

    Args:
        texts: training texts, read once.
        size: largest number of ids; fewer come out where the texts have no more pairs that occur twice.
        special_tokens: tokens that plain text can never produce.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in (_DIGIT, _EAST_ASIAN, _PIECE)),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_MAX_TOKEN_CHARACTERS,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


class Encoder:
    """Owns a vocabulary for making training data. Immutable."""

    def __init__(self, document: str) -> None:
        """Take over the text of a `tokenizer.json`.

        Raises:
            UserError: it is not a tokenizer.
        """
        try:
            self._marked = tokenizers.Tokenizer.from_str(document)
            without_added = json.loads(document)
            without_added["added_tokens"] = []
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(without_added))
        except Exception as error:
            raise UserError(f"this is not a tokenizer file: {error}") from error

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts in which nothing is special: "<think>" becomes its letters."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def marked(self, text: str) -> Encoded:
        """Return the ids of a text in which special tokens are spelled out, as serving reads a rendered prompt."""
        encoding = self._marked.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, [start for start, _ in encoding.offsets])

    def token_id(self, token: str) -> int:
        """Return the id of a token by its spelling in the vocabulary.

        Raises:
            UserError: there is no such token.
        """
        token_id: int | None = self._marked.token_to_id(token)
        if token_id is None:
            raise UserError(f"the tokenizer has no token {token!r}; use one made by headrace's own training")
        return token_id
