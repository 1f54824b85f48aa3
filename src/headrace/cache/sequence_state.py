"""Everything one sequence remembers between steps, and how each part goes back to an earlier length."""

import hashlib
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace.cache.block_table import BlockTable
from headrace.cache.entry_store import EntryStore
from headrace.cache.paged_store import PagedStore
from headrace.cache.slot_pool import Slot
from headrace.cache.state_parts import StateMarks, StateParts, own_parts, pooled_parts
from headrace.cache.state_shape import StateShape
from headrace.cache.window_ring import WindowRing
from headrace.core.errors import CapacityError, InternalError
from headrace.core.state_spec import Rollback, StateSpec


class SequenceState:
    """All memories of one sequence.

    Owns its stores, rings, pair histories and token look-back, in buffers of its own or on a slot and blocks
    (`on_slot`); the behaviour is the same bit for bit. `length` is the number of tokens committed: a forward
    pass appends rows to the parts as it goes and moves `length` once, at its end. A state whose forward pass failed
    half-way must be thrown away. `decoder_floor` is the first position whose decoder window rows exist: 0 after a
    full prefill, the replay start after a replayed one. `encoder_floor` is that of the encoder: 0 but for a state that
    began without the windows of what it found in a cache.
    """

    def __init__(self, shape: StateShape, device: torch.device, parts: StateParts | None = None) -> None:
        parts = own_parts(shape, device) if parts is None else parts
        self.shape = shape
        self.length = 0
        self.decoder_floor = 0
        self.encoder_floor = 0
        self._lowest = 0  # a longer length was taken back to here: what is older is overwritten
        self.stores, self.pairs = dict(parts.stores), dict(parts.pairs)
        self.rings, self.draft_rings = parts.rings, parts.draft_rings
        self._slot, self._table = parts.slot, parts.table
        # compressed ids of the newest tokens, oldest first; deep enough to go back one window
        self._compressed = np.full(shape.lookback_depth, -1, dtype=np.int64)

    @classmethod
    def on_slot(cls, slot: Slot, table: BlockTable) -> "SequenceState":
        """Return the state of a sequence without tokens that lives on a slot and on the blocks of a table."""
        return cls(slot.shape, table.pool.device, pooled_parts(slot, table))

    @property
    def slot(self) -> Slot:
        """The slot it lives on.

        Raises:
            InternalError: it has buffers of its own.
        """
        if self._slot is None:
            raise InternalError("a state with buffers of its own has no slot")
        return self._slot

    @property
    def table(self) -> BlockTable:
        """The blocks it lives on.

        Raises:
            InternalError: it has buffers of its own.
        """
        if self._table is None:
            raise InternalError("a state with buffers of its own has no blocks")
        return self._table

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in the global stores, so that they do not grow step by step."""
        for store in self.stores.values():
            store.reserve(num_tokens // store.ratio)

    def store_of(self, source: int | None) -> EntryStore:
        """Return the store of a KV source layer.

        Raises:
            InternalError: the layer is not a KV source.
        """
        if source is None or source not in self.stores:
            raise InternalError(f"layer {source} is not a KV source")
        return self.stores[source]

    def floor(self, layer_id: int) -> int:
        """Return the first position that a query in layer `layer_id` may look at through its window."""
        return self.decoder_floor if layer_id >= self.shape.decoder_start else self.encoder_floor

    def start_decoder(self, position: int) -> None:
        """Begin the decoder's and the drafter's windows at `position` (a replay start)."""
        self.decoder_floor = position
        for ring in self.rings[self.shape.decoder_start :] + self.draft_rings:
            ring.restart(position)

    def start_encoder(self, position: int) -> None:
        """Begin the encoder's windows at `position`: what follows is an approximation.

        Source: serving.md section 1.1, encoder bounded replay.
        """
        self.encoder_floor = position
        for ring in self.encoder_rings:
            ring.restart(position)

    @cached_property
    def ring_addresses(self) -> np.ndarray:
        """Where the backbone's rings lie: [layers, 2] int64 addresses of codes and scales, which never move."""
        return np.array([[part.data_ptr() for part in ring.stored_bytes] for ring in self.rings], dtype=np.int64)

    def settle_encoder(self, position: int) -> None:
        """Take the encoder's rows from `position` on as exact although its windows began empty; forget those before.

        Whoever calls knows that the windows of later rows no longer reach to where they began, through any layer.

        Raises:
            InternalError: the state does not stand there yet.
        """
        if self.length < position:
            raise InternalError(f"a state of {self.length} tokens cannot be exact from {position} on")
        self.encoder_floor = 0
        for ring in self.encoder_rings:
            ring.stand(max(ring.oldest, position - self.shape.window + 1), ring.end)

    @property
    def encoder_rings(self) -> list[WindowRing]:
        """Window rings of the layers below the decoder."""
        return self.rings[: self.shape.decoder_start]

    @property
    def previous_ids(self) -> np.ndarray:
        """Compressed ids of the newest tokens, [lookback] int64, oldest first, -1 before the start or in an image."""
        return self._compressed[len(self._compressed) - self.shape.lookback :]

    def commit(self, num_tokens: int, compressed: np.ndarray | None) -> None:
        """Move `length` on by `num_tokens` tokens and remember their compressed ids (None without n-grams)."""
        if compressed is not None:
            self._compressed = np.concatenate([self._compressed, compressed])[-len(self._compressed) :]
        self.length += num_tokens

    def resume(self, position: int, compressed: np.ndarray | None) -> None:
        """Stand, without windows yet, at `position` tokens whose entries the table's blocks hold.

        Args:
            position: a multiple of every ratio, at most the table's write floor.
            compressed: compressed ids of the newest tokens before `position`, oldest first; as many as there are, of
                the newest W + lookback. None without n-grams.

        Raises:
            InternalError: the state is not new, or the blocks do not hold that many tokens for good.
        """
        if self.length:
            raise InternalError(f"a state of {self.length} tokens cannot begin from a cache")
        if position > self.table.write_floor or position % self.shape.largest_ratio:
            raise InternalError(f"a state cannot begin at {position} of {self.table.write_floor} tokens")
        for store in self.stores.values():
            if isinstance(store, PagedStore):
                store.resume(position)
        for pair in self.pairs.values():
            pair.restart(position)
        for ring in self.encoder_rings:
            ring.restart(position)
        self.commit(position, compressed)
        self._lowest = position

    def rollback(self, length: int) -> None:
        """Go back to `length` tokens; every part goes back by its own kind (see `describe`).

        Raises:
            CapacityError: more tokens than one window would be taken back, more than there are, or some that others
                may read.
        """
        back = self.length - length
        lowest = max(self._lowest, self.length - self.shape.window, self.decoder_floor, self.encoder_floor)
        if self._table is not None:
            lowest = min(max(lowest, self._table.write_floor), self.length)
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
    def marks(self) -> StateMarks:
        """The numbers that say which bytes are valid."""
        return StateMarks(
            self.length,
            self.decoder_floor,
            self.encoder_floor,
            self._lowest,
            tuple((ring.oldest, ring.end) for ring in self.rings),
            tuple((ring.oldest, ring.end) for ring in self.draft_rings),
            tuple((pair.oldest, pair.end) for pair in self.pairs.values()),
            self._compressed.copy(),
        )

    def stand(self, marks: StateMarks) -> None:
        """Take a pooled state's bytes, put in place from outside, as those of the state that had these marks."""
        self.length, self._lowest = marks.length, marks.lowest
        self.decoder_floor, self.encoder_floor = marks.decoder_floor, marks.encoder_floor
        self._compressed = marks.compressed.copy()
        for store in self.stores.values():
            if isinstance(store, PagedStore):
                store.resume(marks.length)
        ranges = marks.rings + marks.draft_rings
        for ring, span in zip(self.rings + self.draft_rings, ranges, strict=True):
            ring.stand(*span)
        for pair, span in zip(self.pairs.values(), marks.pairs, strict=True):
            pair.stand(*span)

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

    def checksum(self) -> str:
        """Return a checksum of what later tokens can see: equal for equal states however they came about.

        Covers length, floors, stored rows in order, the rows a next token's windows reach (by position), the open half
        pair and the look-back. Buffers, places and what was overwritten have no part in it.
        """
        digest = hashlib.blake2b(digest_size=16)

        def add(tag: str, *parts: Tensor | np.ndarray | int) -> None:
            digest.update(f"{tag} {[part if isinstance(part, int) else tuple(part.shape) for part in parts]}".encode())
            for part in parts:
                if not isinstance(part, int):
                    array = part.contiguous().cpu().numpy() if isinstance(part, Tensor) else part
                    digest.update(array.tobytes())

        add("lengths", self.length, self.decoder_floor, self.encoder_floor)
        for layer_id, store in self.stores.items():
            add(f"store {layer_id}", *store.stored_rows())
        for place, ring in enumerate(self.rings + self.draft_rings):
            low = max(ring.oldest, ring.end - self.shape.window + 1)
            add(f"ring {place}", low, ring.end, *ring.stored_rows(low, ring.end))
        for layer_id, pair in self.pairs.items():
            if self.length % self.stores[layer_id].ratio:
                add(f"pair {layer_id}", *pair.read(self.length - 1))
        add("look-back", self.previous_ids)
        return digest.hexdigest()
