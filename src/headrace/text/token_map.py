"""Collapses a vocabulary to classes of tokens that read alike, e.g. " The", "the" and "THE".

The n-gram memory hashes classes, not tokens. Built from the tokenizer at load time and never stored: the number of
classes fixes the hash multipliers, so a map from any other tokenizer is refused by `memory/addressing.py`.
"""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, normalizers

from headrace.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"  # stands for a token that is one space while white space is stripped


def build_token_map(tokenizer: Tokenizer) -> tuple[NDArray[np.int64], int]:
    """Return the class of every token id.

    Classes are numbered in the order in which their first token appears, so ids 0, 1, 2 of a released tokenizer keep
    their numbers. Tokens that are part of a character are told apart by their raw vocabulary string.

    Returns:
        ([tokenizer.size] class of each id, number of classes).

    Source: specification 3.9.1.
    """
    normalizer = _reading_form()
    classes: dict[str, int] = {}
    token_map = np.empty(tokenizer.size, dtype=np.int64)
    for token_id, text in enumerate(tokenizer.decode_each()):
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        token_map[token_id] = classes.setdefault(key, len(classes))
    return token_map, len(classes)


def _reading_form() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
