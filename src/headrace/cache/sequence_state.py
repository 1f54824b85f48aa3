"""Everything one sequence remembers between steps, and how each part goes back to an earlier length."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from headrace.cache.global_store import GlobalStore
from headrace.cache.pair_history import PairHistory
from headrace.cache.window_ring import WindowRing
from headrace.core.errors import CapacityError, InternalError
from headrace.core.state_spec import Rollback, StateSpec


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


class SequenceState:
    """All memories of one sequence.

    Owns its stores, rings, pair histories and token look-back. `length` is the number of tokens committed: a forward
    pass appends rows to the parts as it goes and moves `length` once, at its end. A state whose forward pass failed
    half-way must be thrown away. `decoder_floor` is the first position whose decoder window rows exist: 0 after a
    full prefill, the replay start after a replayed one.
    """

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.shape = shape
        self.length = 0
        self.decoder_floor = 0
        self._lowest = 0  # a longer length was taken back to here: what is older is overwritten
        depth = 2 * shape.window
        self.stores = {
            layer_id: GlobalStore(shape.head_dim, shape.index_head_dim, ratio, device)
            for layer_id, ratio in shape.source_ratios.items()
        }
        self.pairs = {
            layer_id: PairHistory(shape.head_dim, shape.window + 1, device)
            for layer_id, ratio in shape.source_ratios.items()
            if ratio > 1
        }
        self.rings = [WindowRing(shape.head_dim, depth, device) for _ in range(shape.num_layers)]
        self.draft_rings = [WindowRing(shape.head_dim, depth, device) for _ in range(shape.num_draft_layers)]
        # compressed ids of the newest tokens, oldest first; deep enough to go back one window
        self._compressed = np.full(shape.window + shape.lookback, -1, dtype=np.int64)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in the global stores, so that they do not grow step by step."""
        for store in self.stores.values():
            store.reserve(num_tokens // store.ratio)

    def store_of(self, source: int | None) -> GlobalStore:
        """Return the store of a KV source layer.

        Raises:
            InternalError: the layer is not a KV source.
        """
        if source is None or source not in self.stores:
            raise InternalError(f"layer {source} is not a KV source")
        return self.stores[source]

    def floor(self, layer_id: int) -> int:
        """Return the first position that a query in layer `layer_id` may look at through its window."""
        return self.decoder_floor if layer_id >= self.shape.decoder_start else 0

    def start_decoder(self, position: int) -> None:
        """Begin the decoder's and the drafter's windows at `position` (a replay start)."""
        self.decoder_floor = position
        for ring in self.rings[self.shape.decoder_start :] + self.draft_rings:
            ring.restart(position)

    @property
    def previous_ids(self) -> np.ndarray:
        """Compressed ids of the newest tokens, [lookback] int64, oldest first, -1 before the start or in an image."""
        return self._compressed[len(self._compressed) - self.shape.lookback :]

    def commit(self, num_tokens: int, compressed: np.ndarray | None) -> None:
        """Move `length` on by `num_tokens` tokens and remember their compressed ids (None without n-grams)."""
        if compressed is not None:
            self._compressed = np.concatenate([self._compressed, compressed])[-len(self._compressed) :]
        self.length += num_tokens

    def rollback(self, length: int) -> None:
        """Go back to `length` tokens; every part goes back by its own kind (see `describe`).

        Raises:
            CapacityError: more tokens than one window would be taken back, or more than there are.
        """
        back = self.length - length
        lowest = max(self._lowest, self.length - self.shape.window, self.decoder_floor)
        if back < 0 or length < lowest:
            raise CapacityError(
                f"cannot go back from {self.length} to {length} tokens; accepted are {lowest} to {self.length}"
            )
        if back == 0:
            return
        self._lowest = lowest
        for store in self.stores.values():
            store.truncate(length)
        for pair in self.pairs.values():
            pair.truncate(length)
        for ring in self.rings + self.draft_rings:
            ring.truncate(length)
        fill = np.full(back, -1, dtype=np.int64)
        self._compressed = np.concatenate([fill, self._compressed[: len(self._compressed) - back]])
        self.length = length

    @property
    def global_bytes(self) -> int:
        """Bytes of global KV and index keys in use, measured from the buffers."""
        return sum(store.nbytes for store in self.stores.values())

    def describe(self) -> tuple[StateSpec, ...]:
        """Return what the state is made of, with measured bytes and rollback kinds."""
        per_token = sum(store.row_bytes / store.ratio for store in self.stores.values())
        return (
            StateSpec("global KV and index keys", Rollback.APPEND, 0, per_token),
            StateSpec("window rings", Rollback.RING, sum(ring.nbytes for ring in self.rings), 0),
            StateSpec("draft window rings", Rollback.RING, sum(ring.nbytes for ring in self.draft_rings), 0),
            StateSpec("pair histories", Rollback.HALF_PAIR, sum(pair.nbytes for pair in self.pairs.values()), 0),
            StateSpec("n-gram look-back", Rollback.DERIVED, self._compressed.nbytes, 0),
        )
