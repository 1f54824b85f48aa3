"""Where drafts are trained: anchor positions of documents, and which of the drafted tokens count.

For an anchor p the token at p + 1 is known and the tokens at p + 2 to p + 1 + block size are drafted. Only asked tokens
count, and of those the ones before the first that is not asked. Source: training.md section 7.2, valid positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Ids, Mask, Sample


@dataclass(frozen=True, eq=False)
class Anchors:
    """Anchor positions [A] int64 of one document of a pass, ascending; `valid` [A, X] says which drafts count."""

    document: int
    positions: Ids
    valid: Mask


def eligible(sample: Sample, block_size: int) -> Ids:
    """Return the positions with `block_size` + 1 tokens after them whose first drafted token is asked."""
    last = max(0, len(sample) - block_size - 1)
    return np.flatnonzero(sample.labels[1 : last + 1] != IGNORE)


def anchors_at(document: int, sample: Sample, positions: Ids, block_size: int) -> Anchors:
    """Return anchors at eligible positions of a document."""
    asked = sample.labels[positions[:, None] + 1 + np.arange(block_size)] != IGNORE
    return Anchors(document, positions, np.logical_and.accumulate(asked, axis=1))


def draw_anchors(samples: Sequence[Sample], count: int, block_size: int, draws: Draws) -> list[Anchors]:
    """Draw anchors without repetition from all eligible positions of some documents together.

    Args:
        samples: the documents of a pass.
        count: anchors to draw; all are taken where there are fewer.
        block_size: drafted tokens.
        draws: decides.

    Returns:
        One entry per document that got an anchor, in order.
    """
    pools = [eligible(sample, block_size) for sample in samples]
    owners = np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    positions = np.concatenate([*pools, np.zeros(0, dtype=np.int64)])
    chosen = np.sort(draws.distinct(len(positions), min(count, len(positions)))) if len(positions) else positions
    return [
        anchors_at(place, samples[place], positions[chosen[owners[chosen] == place]], block_size)
        for place in np.unique(owners[chosen]).tolist()
    ]
