"""Cuts a batch into passes of the model: documents, what the decoder runs on in each, and the labels of its rows.

With replay the decoder runs behind cuts, as serving does after a prefill of P tokens: on the last W of them and on
what follows, its windows reaching back to the first of these. Source: training.md section 5.2, variants A and B.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Batch, Ids
from headrace.train.graph import Document, Segment
from headrace.train.recipe import Phase

_LONG_RUN_WINDOWS = 2  # labelled rows in a row, in windows, from which a text counts as one without turns
_TURN_WINDOWS = (1, 4)  # its turns are cut at random, so many windows long


@dataclass(frozen=True, eq=False)
class Pass:
    """What the model runs at once.

    `labels` [R], `kinds` [R] and `weights` [R] float32 belong to the decoder's rows, document by document and segment
    by segment; `kinds` index the batch's `kind_names`, `weights` are what a label counts in the loss.
    """

    documents: tuple[Document, ...]
    labels: Ids
    kinds: Ids
    weights: np.ndarray

    @property
    def num_labels(self) -> int:
        """Rows with a label."""
        return int((self.labels != IGNORE).sum())

    @property
    def weight(self) -> float:
        """Sum of the weights of all rows with a label."""
        return float(self.weights[self.labels != IGNORE].astype(np.float64).sum())


@dataclass(frozen=True, eq=False)
class Passes:
    """A whole batch: its passes, the names of the kinds of documents, and the tokens that are no padding."""

    passes: tuple[Pass, ...]
    kind_names: tuple[str, ...]
    num_tokens: int

    @property
    def num_labels(self) -> int:
        """Rows with a label over all passes."""
        return sum(one.num_labels for one in self.passes)

    @property
    def weight(self) -> float:
        """Sum of the weights of all rows with a label."""
        return sum(one.weight for one in self.passes)

    @property
    def num_documents(self) -> int:
        """Documents over all passes."""
        return sum(len(one.documents) for one in self.passes)


def plan_passes(
    batch: Batch,
    phase: Phase,
    window: int,
    micro_batch: int,
    draws: Draws,
    label_weights: Mapping[str, float] | None = None,
) -> Passes:
    """Plan all passes of a batch.

    Args:
        batch: rows of documents.
        phase: says how the decoder runs.
        window: W.
        micro_batch: tokens of a pass at most, in whole rows, at least one.
        draws: decides cuts and which documents are seen whole.
        label_weights: kind of document -> what its labels count in the loss; 1 where it is not named.
    """
    kind_names = tuple(sorted({kind for kinds in batch.kinds for kind in kinds}))
    rows_at_once = max(1, micro_batch // batch.token_ids.shape[1])
    weights = np.array([(label_weights or {}).get(kind, 1.0) for kind in kind_names], dtype=np.float32)

    def cutter(labels: Ids) -> tuple[Cut, ...] | None:
        return plan_segments(labels, phase, window, draws)

    passes = []
    for low in range(0, len(batch.token_ids), rows_at_once):
        parts = [
            _run_document(batch.token_ids[row, where], batch.labels[row, where], kind_names.index(kind), cutter)
            for row in range(low, min(low + rows_at_once, len(batch.token_ids)))
            for where, kind in _documents(batch, row)
        ]
        passes.append(_join(parts, weights))
    return Passes(tuple(passes), kind_names, batch.num_tokens)


def _documents(batch: Batch, row: int) -> Iterator[tuple[slice, str]]:
    for span, kind in zip(batch.spans[row], batch.kinds[row], strict=True):
        yield slice(span.start, span.start + span.length), kind


class _Part(NamedTuple):
    """One document of a pass, the labels of its decoder rows, and its kind."""

    document: Document
    labels: Ids
    kind: int


def _run_document(ids: Ids, labels: Ids, kind: int, cutter: "Callable[[Ids], tuple[Cut, ...] | None]") -> _Part:
    segments = cutter(labels)
    if segments is None:
        return _Part(Document(ids), labels, kind)
    parts = []
    for cut in segments:
        part = labels[cut.segment.low : cut.segment.high].copy()
        part[: cut.judged_from - cut.segment.low] = IGNORE
        parts.append(part)
    return _Part(Document(ids, tuple(cut.segment for cut in segments)), np.concatenate(parts), kind)


def _join(parts: Sequence[_Part], weights: np.ndarray) -> Pass:
    kinds = np.concatenate([np.full(len(part.labels), part.kind) for part in parts])
    return Pass(
        documents=tuple(part.document for part in parts),
        labels=np.concatenate([part.labels for part in parts]),
        kinds=kinds,
        weights=weights[kinds],
    )


@dataclass(frozen=True)
class Cut:
    """A decoder segment and its first row whose label counts; the rows before it are the replayed prompt."""

    segment: Segment
    judged_from: int


def plan_segments(labels: Ids, phase: Phase, window: int, draws: Draws) -> tuple[Cut, ...] | None:
    """Return the decoder segments of one document; None where the decoder sees it whole.

    A turn is a run of labelled rows; the row before its first predicted token, the first labelled one, is the last of
    the prompt. A run that is long against the window is text without turns, and is cut at random places.

    Args:
        labels: [n] of the document.
        phase: how the decoder runs.
        window: W.
        draws: see `plan_passes`.
    """
    if phase.replay == "off":
        return None
    is_exact = draws.is_below(phase.exact_share)
    runs = list(labelled_runs(labels))
    if is_exact or not runs:
        return None
    if phase.replay == "last-turn":
        first, stop = runs[-1]
        if stop - first > _LONG_RUN_WINDOWS * window:
            first = draws.between(first, stop - 1)
        return (_cut(first, len(labels), window),)
    turns = [turn for run in runs for turn in _turns(*run, window, draws)]
    return tuple(_cut(first, stop, window) for first, stop in turns)


def labelled_runs(labels: Ids) -> Iterator[tuple[int, int]]:
    """Yield first and last + 1 row of every stretch of labelled rows."""
    is_asked = np.concatenate([[False], labels != IGNORE, [False]]).astype(np.int8)
    edges = np.diff(is_asked)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    yield from zip(starts.tolist(), stops.tolist(), strict=True)


def _turns(first: int, stop: int, window: int, draws: Draws) -> Iterator[tuple[int, int]]:
    """Cut a long run into turns of random length; a short one is one turn."""
    while stop - first > _LONG_RUN_WINDOWS * window:
        length = draws.between(_TURN_WINDOWS[0] * window, _TURN_WINDOWS[1] * window)
        if first + length >= stop:
            break
        yield first, first + length
        first += length
    yield first, stop


def _cut(first: int, stop: int, window: int) -> Cut:
    """Return the segment of a turn whose first predicted row is `first`: the prompt has `first` + 1 tokens."""
    start = max(0, first + 1 - window)
    return Cut(Segment(start, stop, start), first)
