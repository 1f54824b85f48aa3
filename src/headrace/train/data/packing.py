"""Puts documents into rows of equal length so that nothing of one document reaches another.

A document keeps its own positions, labels, windows, compression groups and n-grams: a row only says where each of its
documents lies (`Span`), and `layout.py` derives the rest from that. This module knows neither text nor models.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import InternalError, UserError

IGNORE = -100
"""The label of a position without one; the value that torch's cross entropy leaves out."""

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Span(NamedTuple):
    """A document's place in a row: tokens start to start + length - 1."""

    start: int
    length: int


class Answer(NamedTuple):
    """Positions whose predictions are judged: the logits at start to start + length - 1 give the answer's tokens.

    `distance` counts the tokens from the last token of the clue to position `start`; None where there is no one clue.
    """

    start: int
    length: int
    distance: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One document as tokens, before it has a place in a row.

    Attributes:
        token_ids: [S] ids, at least one.
        labels: [S] what each position should predict, `IGNORE` where nothing is asked.
        kind: name for metrics, "text" or a task's name.
        answers: judged positions, relative to the document.
    """

    token_ids: Ids
    labels: Ids
    kind: str = "text"
    answers: tuple[Answer, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """One row of T tokens. Invariant: documents follow one another from token 0; only padding comes after the last.

    Attributes:
        token_ids, labels, positions: [T]; padding has label `IGNORE`, and positions count from 0 as in a document.
        spans: the documents, in order; none is empty.
        kinds: one per document.
        answers: judged positions, relative to the row.
    """

    token_ids: Ids
    labels: Ids
    positions: Ids
    spans: tuple[Span, ...]
    kinds: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """B rows of T tokens, ready for a model. Owns its arrays; nothing may change them after `stack_rows`.

    Attributes:
        token_ids, labels, positions: [B, T] int64; see `PackedRow`.
        loss_mask: [B, T] true where there is a label.
        is_padding: [B, T] true where there is no document; routers must not count these.
        document_ids: [B, T] index of the document in its row; padding has the index after the last document.
        spans, kinds, answers: per row; see `PackedRow`.
    """

    token_ids: Ids
    labels: Ids
    positions: Ids
    loss_mask: Mask
    is_padding: Mask
    document_ids: Ids
    spans: tuple[tuple[Span, ...], ...]
    kinds: tuple[tuple[str, ...], ...]
    answers: tuple[tuple[Answer, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.is_padding.size - self.is_padding.sum())

    @property
    def utilisation(self) -> float:
        """Share of the tokens that are not padding."""
        return self.num_tokens / self.is_padding.size

    def segments(self, row: int) -> tuple[Span, ...]:
        """Return the spans of a row with its padding, where there is any, as a last span: together they cover it."""
        spans = self.spans[row]
        used = sum(span.length for span in spans)
        rest = self.token_ids.shape[1] - used
        return (*spans, Span(used, rest)) if rest else spans


def next_token_labels(token_ids: Ids, is_asked: Mask | None = None) -> Ids:
    """Return the labels of one document: at each position the token after it, `IGNORE` at the last.

    Args:
        token_ids: [S] the document.
        is_asked: [S] true for tokens that should be learned; None for all. A label stands one position before its
            token, so the first token is never a label.
    """
    labels = np.full(len(token_ids), IGNORE, dtype=np.int64)
    labels[:-1] = token_ids[1:]
    if is_asked is not None:
        labels[:-1][~is_asked[1:]] = IGNORE
    return labels


def text_sample(token_ids: Ids) -> Sample:
    """Return a document in which every token but the first is to be predicted."""
    return Sample(token_ids=token_ids, labels=next_token_labels(token_ids))


def pre_split(length: int, row_tokens: int) -> list[Span]:
    """Cut a document that is longer than a row into pieces of exactly a row and a rest; leave others whole."""
    return [Span(start, min(row_tokens, length - start)) for start in range(0, length, row_tokens)]


def best_fit(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Distribute documents over rows: longest first, each into the fullest row that still has room for it.

    Args:
        lengths: tokens of each document, 1 to `row_tokens` each.
        row_tokens: tokens of a row.

    Returns:
        The documents' indices, one list per row; documents of a row in their original order, rows ordered by their
        first document. With lengths 3, 5, 2, 4 and rows of 7: [[0, 3], [1, 2]].

    Raises:
        UserError: a document is empty or longer than a row.

    Numerics: exact; equal lengths and equally full rows are taken in their original order.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= row_tokens:
            raise UserError(f"document {index} has {length} tokens; a row holds documents of 1 to {row_tokens} tokens")
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that is large enough is the fullest
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            free, row = rooms.pop(place)
            rows[row].append(index)
        else:
            free, row = row_tokens, len(rows)
            rows.append([index])
        bisect.insort(rooms, (free - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def best_fitting(lengths: Sequence[int], room: int) -> int | None:
    """Return the index of the longest length that fits in `room`, the first of several; None where none fits."""
    best: int | None = None
    for index, length in enumerate(lengths):
        if length <= room and (best is None or length > lengths[best]):
            best = index
            if length == room:
                break
    return best


def pack_row(samples: Sequence[Sample], row_tokens: int, pad_id: int) -> PackedRow:
    """Lay documents one after another into a row and pad the rest.

    Raises:
        InternalError: they do not fit, or one is empty.
    """
    total = sum(map(len, samples))
    if total > row_tokens or not all(map(len, samples)):
        raise InternalError(f"documents of {list(map(len, samples))} tokens do not make a row of {row_tokens}")
    token_ids = np.full(row_tokens, pad_id, dtype=np.int64)
    labels = np.full(row_tokens, IGNORE, dtype=np.int64)
    positions = np.arange(row_tokens, dtype=np.int64)
    spans: list[Span] = []
    answers: list[Answer] = []
    start = 0
    for sample in samples:
        end = start + len(sample)
        token_ids[start:end], labels[start:end] = sample.token_ids, sample.labels
        positions[start:] -= positions[start]
        spans.append(Span(start, len(sample)))
        answers.extend(answer._replace(start=start + answer.start) for answer in sample.answers)
        start = end
    if start < row_tokens:
        positions[start:] -= positions[start]
    return PackedRow(
        token_ids=token_ids,
        labels=labels,
        positions=positions,
        spans=tuple(spans),
        kinds=tuple(sample.kind for sample in samples),
        answers=tuple(answers),
    )


def stack_rows(rows: Sequence[PackedRow]) -> Batch:
    """Return the batch of rows of equal length.

    Raises:
        InternalError: there is no row, or lengths differ.
    """
    if len({len(row.token_ids) for row in rows}) != 1:
        raise InternalError("a batch needs rows, all of one length")
    num_tokens = len(rows[0].token_ids)
    labels = np.stack([row.labels for row in rows])
    document_ids = np.empty_like(labels)
    for ids, row in zip(document_ids, rows, strict=True):
        lengths = [span.length for span in row.spans]
        lengths.append(num_tokens - sum(lengths))
        ids[:] = np.repeat(np.arange(len(lengths)), lengths)
    used = np.array([row.num_tokens for row in rows])
    return Batch(
        token_ids=np.stack([row.token_ids for row in rows]),
        labels=labels,
        positions=np.stack([row.positions for row in rows]),
        loss_mask=labels != IGNORE,
        is_padding=np.arange(num_tokens) >= used[:, None],
        document_ids=document_ids,
        spans=tuple(row.spans for row in rows),
        kinds=tuple(row.kinds for row in rows),
        answers=tuple(row.answers for row in rows),
    )


def pack_all(samples: Sequence[Sample], row_tokens: int, pad_id: int) -> list[PackedRow]:
    """Pack a fixed set of documents into as few rows as best fit needs, e.g. held-out text or conversations.

    Raises:
        UserError: a document is longer than a row.
    """
    plan = best_fit([len(sample) for sample in samples], row_tokens)
    return [pack_row([samples[index] for index in row], row_tokens, pad_id) for row in plan]
