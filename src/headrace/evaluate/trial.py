"""Documents judged in several modes at once: one pass of the encoder, one decoder segment per mode and prompt.

The training graph gives the bits of the serving path (`train/graph.py`). What a mode means here:

    full     the decoder runs on everything
    replay   the decoder runs on the last W tokens of the prompt and on what follows, as serving does by default
    cold     no token of the prompt is replayed but its last: the control that must be worse than replay

A full row depends on the decoder rows of W - 1 tokens per decoder layer before it, no more. Where only the end of a
document is judged, the decoder starts there instead of at 0, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.models.deepseek_v41.config import Config
from headrace.train.data.packing import IGNORE, Ids
from headrace.train.graph import Document, GraphOptions, GraphOutput, Segment, TrainGraph
from headrace.train.losses import cross_entropy

Mode = Literal["full", "replay", "cold"]
_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class Trial:
    """One document to judge.

    Attributes:
        token_ids: [S].
        labels: [S] the token that each judged row should predict, `IGNORE` elsewhere.
        runs: first and last + 1 row of every answer; the prompt of an answer ends with its first row. All their rows
            have labels; labels before the first run are judged in full mode only.
    """

    token_ids: Ids
    labels: Ids
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Judged:
    """Judged rows of a trial in one mode: `rows` [R], `nats` [R] float64 each label costs, `is_right` [R] bool."""

    rows: Ids
    nats: NDArray[np.float64]
    is_right: NDArray[np.bool_]

    def within(self, first: int, stop: int) -> "Judged":
        """Return the rows from `first` to `stop` - 1."""
        return self.chosen((self.rows >= first) & (self.rows < stop))

    def chosen(self, mask: NDArray[np.bool_]) -> "Judged":
        """Return the rows where a mask [R] is true."""
        return Judged(self.rows[mask], self.nats[mask], self.is_right[mask])


@dataclass(frozen=True, eq=False)
class Plan:
    """The document of a trial, and per mode: which rows are judged, and where the decoder's output has them."""

    document: Document
    rows: dict[Mode, Ids]
    places: dict[Mode, Ids]

    @property
    def num_decoder_rows(self) -> int:
        """Rows of the decoder's output."""
        return sum(part.high - part.low for part in self.document.segments or ())


def decoder_reach(config: Config) -> int:
    """Return how many decoder rows before a row its full-mode result depends on."""
    return (config.num_layers - config.cut) * (config.window - 1)


def plan_trial(trial: Trial, config: Config, modes: Sequence[Mode]) -> Plan:
    """Lay out the decoder segments of every mode."""
    judged = np.flatnonzero(trial.labels != IGNORE)
    segments: list[Segment] = []
    rows: dict[Mode, Ids] = {}
    places: dict[Mode, Ids] = {}
    offset = 0
    for mode in modes:
        mode_rows, mode_places = [], []
        for first, stop, start in _parts(trial, judged, config, mode):
            segments.append(Segment(start, stop, start))
            part = judged[(judged >= first) & (judged < stop)]
            mode_rows.append(part)
            mode_places.append(offset + part - start)
            offset += stop - start
        rows[mode], places[mode] = np.concatenate(mode_rows), np.concatenate(mode_places)
    return Plan(Document(trial.token_ids, tuple(segments)), rows, places)


def _parts(trial: Trial, judged: Ids, config: Config, mode: Mode) -> Iterator[tuple[int, int, int]]:
    """Yield first judged row, last + 1 row, and first decoder row of every segment of a mode."""
    if mode == "full":
        first, stop = int(judged[0]), int(judged[-1]) + 1
        yield first, stop, max(0, first - decoder_reach(config))
        return
    for first, stop in trial.runs:
        yield first, stop, first if mode == "cold" else max(0, first + 1 - config.window)


@torch.no_grad()
def judge_trials(
    graph: TrainGraph, options: GraphOptions, trials: Sequence[Trial], modes: Sequence[Mode]
) -> list[dict[Mode, Judged]]:
    """Judge trials, several at once where they are short; a trial's result does not depend on the others."""
    found = []
    for batch in _batches(trials):
        plans = [plan_trial(trial, graph.config, modes) for trial in batch]
        output = graph.forward([plan.document for plan in plans], options)
        offset = 0
        for trial, plan in zip(batch, plans, strict=True):
            found.append({mode: _judge(output, trial, plan, mode, offset) for mode in modes})
            offset += plan.num_decoder_rows
    return found


def _batches(trials: Sequence[Trial]) -> Iterator[list[Trial]]:
    batch: list[Trial] = []
    for trial in trials:
        if batch and sum(len(one.token_ids) for one in batch) + len(trial.token_ids) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(trial)
    if batch:
        yield batch


def _judge(output: GraphOutput, trial: Trial, plan: Plan, mode: Mode, offset: int) -> Judged:
    rows = plan.rows[mode]
    hidden = output.hidden_TD.index_select(0, torch.from_numpy(offset + plan.places[mode]))
    costs = cross_entropy(hidden, output.head, torch.from_numpy(trial.labels[rows]))
    return Judged(rows, costs.losses_T.double().numpy(), costs.correct_T.numpy())
