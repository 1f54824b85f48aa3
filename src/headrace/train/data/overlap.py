"""How much of a held-out text is also in the training text, word for word: headers and tables leak across splits."""

import numpy as np
from numpy.typing import NDArray

from headrace.train.data.documents import TokenizedText

NGRAM = 13
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def shared_share(train: TokenizedText, held_out: TokenizedText, ngram: int = NGRAM) -> float:
    """Return the share of the held-out text's n-grams of tokens that occur in the training text; 0 where it has none.

    Numerics: n-grams are compared by 64-bit hashes; two of a billion collide with a chance of about 3 %.
    """
    known, asked = _hashes(train, ngram), _hashes(held_out, ngram)
    return float(np.isin(asked, np.unique(known)).mean()) if len(asked) else 0.0


def _hashes(text: TokenizedText, ngram: int) -> NDArray[np.uint64]:
    """Return a hash of every n-gram inside a document."""
    count = len(text.token_ids) - ngram + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for step in range(ngram):
        hashes = (hashes + text.token_ids[step : step + count].astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    lengths = np.diff(text.offsets)
    ends = np.repeat(text.offsets[1:], lengths)[:count]
    return hashes[np.arange(count) + ngram <= ends]
