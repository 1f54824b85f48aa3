"""What one row's attention read, for requests that ask for it: layer by layer, as spans of token positions."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.engine.core.step_xray import Reads, Spans, StepXray
from headrace.models.deepseek_v41.batch import Rows
from headrace.models.deepseek_v41.plan import LayerPlan

_MAX_VERIFIED = 16  # rows: more than a step verifies of one answer, fewer than a prefill chunk has

__all__ = ["Reads", "ReadsProbe", "Spans", "StepXray", "merged_spans"]


class ReadsProbe:
    """Watches a forward pass and keeps what the last row of some sequences selected. Changes nothing."""

    def __init__(self, layers: Iterable[LayerPlan], window: int, states: Iterable[SequenceState]) -> None:
        self._ratios = {plan.id: plan.ratio for plan in layers}
        self._decoder = {plan.id for plan in layers if plan.half == "decoder"}
        self._window = window
        self._states = list(states)
        self._found: list[dict[int, Reads]] = [{} for _ in self._states]

    def reads_of(self, state: SequenceState) -> dict[int, Reads]:
        """Return what was found for a sequence."""
        return next(found for one, found in zip(self._states, self._found, strict=True) if one is state)

    def layer_input(self, _layer_id: int, _rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Leave a layer's input as it is."""
        return x_TMD, pre_TM

    def producer_input(self, _layer_id: int, _rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the producer's input as it is."""
        return x_TMD, pre_TM

    def record(self, _name: str, _layer_id: int, _rows: Rows, _tensor: Tensor) -> None:
        """Keep nothing of other tensors."""

    def record_selection(self, layer_id: int, rows: Rows, picked: list[Tensor], _blocks: list[Tensor] | None) -> None:
        """Keep the last row's entries, and those of every row where they are few: each may give a token."""
        for segment, picks in zip(rows.segments, picked, strict=True):
            for state, found in zip(self._states, self._found, strict=True):
                if segment.state is state:
                    floor = state.decoder_floor if layer_id in self._decoder else state.encoder_floor
                    last = segment.first + segment.count - 1
                    count = segment.count if segment.count <= _MAX_VERIFIED else 1
                    newest_first = [
                        self._reads(layer_id, picks[-1 - back], last - back, floor) for back in range(count)
                    ]
                    found[layer_id] = replace(newest_first[0], earlier=tuple(newest_first[1:]))

    def _reads(self, layer_id: int, picks: Tensor, position: int, floor: int) -> Reads:
        first = max(floor, position + 1 - self._window)
        return Reads(window=(first, position + 1), entries=merged_spans(picks.cpu().numpy(), self._ratios[layer_id]))


def merged_spans(entries: np.ndarray, ratio: int) -> Spans:
    """Return the token spans of entries [K] (-1 is none), neighbours joined, in order."""
    kept = np.unique(entries[entries >= 0])
    if not len(kept):
        return ()
    breaks = np.flatnonzero(np.diff(kept) > 1)
    firsts = kept[np.concatenate([[0], breaks + 1])]
    lasts = kept[np.concatenate([breaks, [len(kept) - 1]])]
    return tuple((int(first) * ratio, (int(last) + 1) * ratio) for first, last in zip(firsts, lasts, strict=True))
