"""What each token of a packed row may see: its window, its document's compressed entries, its document's n-grams.

Everything is derived from the spans of `packing.py` (`Batch.segments`), so no state crosses from one document into
the next: groups restart at a document's first token, and a last group that lacks tokens gives no entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.errors import InternalError
from headrace.memory.addressing import Addressing
from headrace.train.data.packing import Ids, Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The compressed entries of one row at one ratio; C entries in the order of their tokens.

    Attributes:
        members: [C, ratio] the row's token indices that make each entry.
        positions: [C] the entry's rotary position: that of its first token in its document.
        document_ids: [C] index of the entry's segment.
        visible_from, visible_to: [T] token t may use entries visible_from[t] to visible_to[t] - 1. An entry is visible
            from the token that completes it.
    """

    members: Ids
    positions: Ids
    document_ids: Ids
    visible_from: Ids
    visible_to: Ids


def group_tokens(segments: Sequence[Span], ratio: int) -> Groups:
    """Return the compressed entries of a row.

    For segments of 3 and 4 tokens and ratio 2 the entries are (0, 1), (3, 4), (5, 6); token 2 makes none.

    Args:
        segments: spans that cover the row without gaps, in order.
        ratio: tokens per entry, at least 1.

    Source: specification 3.4, entries and visibility.
    """
    starts, lengths = _checked(segments)
    counts = lengths // ratio
    first_entries = np.cumsum(counts) - counts
    document_ids = np.repeat(np.arange(len(counts)), counts)
    local = np.arange(counts.sum()) - first_entries[document_ids]
    first_tokens = starts[document_ids] + local * ratio
    token_documents = np.repeat(np.arange(len(lengths)), lengths)
    token_positions = np.arange(lengths.sum()) - starts[token_documents]
    visible_from = first_entries[token_documents]
    return Groups(
        members=first_tokens[:, None] + np.arange(ratio),
        positions=local * ratio,
        document_ids=document_ids,
        visible_from=visible_from,
        visible_to=visible_from + (token_positions + 1) // ratio,
    )


def window_starts(segments: Sequence[Span], window: int) -> Ids:
    """Return [T] the first token index that each token's window of `window` tokens (itself included) reaches."""
    starts, lengths = _checked(segments)
    tokens = np.arange(lengths.sum())
    return np.maximum(np.repeat(starts, lengths), tokens - window + 1)


def ngram_histories(addressing: Addressing, token_ids: Ids, segments: Sequence[Span]) -> Ids:
    """Return [T, N] the look-back ids of every token, each document read as a sequence of its own."""
    compressed = addressing.compress(token_ids)
    return np.concatenate(
        [addressing.history(compressed[span.start : span.start + span.length], addressing.fresh()) for span in segments]
    )


def _checked(segments: Sequence[Span]) -> tuple[Ids, Ids]:
    starts = np.array([span.start for span in segments], dtype=np.int64)
    lengths = np.array([span.length for span in segments], dtype=np.int64)
    if not len(segments) or (starts != np.cumsum(lengths) - lengths).any() or (lengths < 1).any():
        raise InternalError(f"segments {list(segments)} do not cover a row without gaps")
    return starts, lengths
