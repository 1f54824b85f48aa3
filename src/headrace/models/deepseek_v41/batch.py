"""What one forward pass works on: spans of sequences, flattened to rows, and what it gives back."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import UserError

Mode = Literal["full", "replay"]


@dataclass(frozen=True)
class ImageRows:
    """Image positions of a span.

    `is_image_T` [T] bool marks them; `rows_ND` [N, D] bfloat16 replaces their embeddings, in order.
    """

    is_image_T: np.ndarray
    rows_ND: Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence for one forward pass.

    Positions are `state.length` onwards. `decoder_rows` counts the last rows the decoder runs on: all in full mode and
    in decode, none for an inner chunk of a replayed prompt, up to one window for its last chunk, which also has
    `is_replay`: the decoder's windows begin anew at the first of those rows.
    """

    state: SequenceState
    token_ids: np.ndarray
    decoder_rows: int
    is_replay: bool = False
    images: ImageRows | None = None

    @property
    def num_rows(self) -> int:
        """Tokens in the span."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Segment:
    """Rows `offset` .. `offset + count` of a flat batch: positions `first` onwards of one sequence."""

    state: SequenceState
    first: int
    count: int
    offset: int

    @property
    def rows(self) -> slice:
        """The segment's place in the flat batch."""
        return slice(self.offset, self.offset + self.count)


@dataclass(frozen=True)
class Rows:
    """Flat rows of a batch: segments, positions [T] int64 and image marks [T] bool (None without images)."""

    segments: tuple[Segment, ...]
    positions: Tensor
    is_image: Tensor | None

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.positions.shape[0]


def flatten(spans: list[Span], device: torch.device) -> Rows:
    """Lay the spans' rows one after the other."""
    segments, positions, marks, offset = [], [], [], 0
    for span in spans:
        first = span.state.length
        segments.append(Segment(span.state, first, span.num_rows, offset))
        positions.append(torch.arange(first, first + span.num_rows, device=device))
        marks.append(np.zeros(span.num_rows, dtype=bool) if span.images is None else span.images.is_image_T)
        offset += span.num_rows
    has_images = any(span.images is not None for span in spans)
    is_image = torch.from_numpy(np.concatenate(marks)).to(device) if has_images else None
    return Rows(tuple(segments), torch.cat(positions), is_image)


def keep_tails(rows: Rows, counts: list[int]) -> tuple[Rows, Tensor]:
    """Return the last `counts[i]` rows of every segment and their indices in the flat batch."""
    segments, kept, offset = [], [], 0
    for segment, count in zip(rows.segments, counts, strict=True):
        if count == 0:
            continue
        skipped = segment.count - count
        segments.append(Segment(segment.state, segment.first + skipped, count, offset))
        kept.append(torch.arange(segment.offset + skipped, segment.offset + segment.count))
        offset += count
    index = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.int64)
    index = index.to(rows.positions.device)
    is_image = None if rows.is_image is None else rows.is_image[index]
    return Rows(tuple(segments), rows.positions[index], is_image), index


@dataclass
class Work:
    """Counts of what was really computed; they add up over forward passes.

    `layer_rows` are complete layers times rows, `producer_rows` rows on which only the decoder's KV producer ran,
    `index_scored` index scores of visible entries, `replayed_rows` prompt rows of bounded decoder replays.
    """

    layer_rows: int = 0
    producer_rows: int = 0
    index_scored: int = 0
    index_scored_by_layer: dict[int, int] = field(default_factory=dict)
    replayed_rows: int = 0

    def add_index(self, layer_id: int, count: int) -> None:
        """Count `count` index scores of layer `layer_id`."""
        self.index_scored += count
        self.index_scored_by_layer[layer_id] = self.index_scored_by_layer.get(layer_id, 0) + count


@dataclass(frozen=True)
class Output:
    """Result of a forward pass.

    `logits` [R, V] float32 for the wanted rows in batch order; `taps` [R', n * D] bfloat16 for the decoder's rows and
    `decoder` the layout of those rows. `faults` has the error of every span that read a damaged n-gram row, by its
    place among the spans, where that is no error of the batch.
    """

    logits: Tensor
    taps: Tensor | None
    decoder: Rows
    faults: dict[int, UserError] = field(default_factory=dict)
