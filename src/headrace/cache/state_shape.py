"""Sizes of what one sequence remembers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StateShape:
    """Sizes of a sequence's state.

    `source_ratios` maps each KV source layer to its ratio, `num_layers` counts backbone layers, `decoder_start` is
    the first decoder layer, `lookback` the earlier n-gram ids a token needs.
    """

    head_dim: int
    index_head_dim: int
    window: int
    num_layers: int
    num_draft_layers: int
    decoder_start: int
    source_ratios: Mapping[int, int]
    lookback: int

    @property
    def ring_depth(self) -> int:
        """Rows of a window ring: twice the window, so that a window of tokens can be taken back."""
        return 2 * self.window

    @property
    def pair_sources(self) -> tuple[int, ...]:
        """KV sources whose tokens wait for a partner."""
        return tuple(layer_id for layer_id, ratio in self.source_ratios.items() if ratio > 1)

    @property
    def largest_ratio(self) -> int:
        """Tokens of the longest entry; at a multiple of it no entry is half done."""
        return max(self.source_ratios.values(), default=1)

    @property
    def lookback_depth(self) -> int:
        """Compressed ids that are kept: enough to go back one window."""
        return self.window + self.lookback
