"""Rearranges a document so that a model learns to fill in its middle: prefix, suffix, then the middle.

The cuts fall between characters, wherever that is in a token. Read `documents.py` for when this happens.
"""

from typing import NamedTuple

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws

RATE = 0.1
"""The published share of documents."""


class Cut(NamedTuple):
    """A text in three parts; joined they are the text."""

    prefix: str
    middle: str
    suffix: str


def draw_cut(text: str, name: str, seed: int, rate: float = RATE) -> Cut | None:
    """Return a document's parts, or None where it stays as it is; decided by the seed, the name and the length alone.

    Args:
        text: the document. Its two cuts are uniform over the places between characters, its ends included.
        name: the document's name.
        seed: of the run.
        rate: share of the documents to cut, 0 to 1.

    Raises:
        UserError: `rate` is not between 0 and 1.
    """
    if not 0 <= rate <= 1:
        raise UserError(f"the fill-in-the-middle rate is {rate}; accepted is a number from 0 to 1", param="fim_rate")
    draws = Draws(seed, "fim", name)
    if not draws.is_below(rate):
        return None
    start, end = sorted(draws.integers(len(text) + 1, 2).tolist())
    return Cut(text[:start], text[start:end], text[end:])


def encode_cut(cut: Cut, encoder: Encoder) -> list[int]:
    """Return the ids: begin sentinel, prefix, hole sentinel, suffix, end sentinel, middle.

    Source: the DeepSeek-V3 lineage, prefix-suffix-middle (training notes, section 10).
    """
    begin, hole, end = map(
        encoder.token_id, (special_tokens.FIM_BEGIN, special_tokens.FIM_HOLE, special_tokens.FIM_END)
    )
    prefix, suffix, middle = encoder.plain([cut.prefix, cut.suffix, cut.middle])
    return [begin, *prefix, hole, *suffix, end, *middle]
