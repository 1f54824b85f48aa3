"""State of one document inside a training graph: the serving caches' interface over tensors that carry gradients."""

import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.block_quant import Quantiser


class GraphStore:
    """Global entries and index keys of one KV source, for one document; written once, or never in a short one."""

    def __init__(self, ratio: int, kv: Quantiser, index: Quantiser, no_entries_CH: Tensor, no_keys_CI: Tensor) -> None:
        """Start empty, with entries and keys of no rows that say width and dtype."""
        self.ratio = ratio
        self.length = 0
        self._kv = kv
        self._index = index
        self._entries = no_entries_CH
        self._keys = no_keys_CI

    def append(self, entries_CH: Tensor, index_keys_CI: Tensor) -> None:
        """Round and keep the document's entries and its index keys."""
        self._entries = self._kv(entries_CH)
        self._keys = self._index(index_keys_CI)
        self.length = entries_CH.shape[0]

    @property
    def rows(self) -> Tensor:
        """All entries [C, H], with gradient."""
        return self._entries

    @property
    def taught(self) -> Tensor | None:
        """What `gather` reads from; None while there are no entries."""
        return self._entries if self.length else None

    @property
    def keys(self) -> Tensor:
        """All index keys [C, I]; their gradient reaches the key projection and its norm only."""
        return self._keys

    def gather(self, rows_TK: Tensor) -> Tensor:
        """Return entries of rows [T, K] (-1 reads row 0) as [T, K, H]; zeros if there are none."""
        if self.length == 0:
            return self._entries.new_zeros((*rows_TK.shape, self._entries.shape[1]))
        picked = torch.index_select(self._entries, 0, rows_TK.clamp_min(0).reshape(-1))
        return picked.view(*rows_TK.shape, -1)

    def index_keys(self, low: int, high: int) -> Tensor:
        """Return index keys `low` .. `high` - 1, [n, I]."""
        return self._keys[low:high]

    def gather_index_keys(self, rows_TK: Tensor) -> Tensor:
        """Return index keys of rows [T, K] (-1 reads row 0), [T, K, I]."""
        return self._keys[rows_TK.clamp_min(0)]


class _NoRing:
    """Stands for a window ring: a document is seen whole, so nothing has to be remembered."""

    def store(self, first: int, rows_SH: Tensor) -> None:
        """Forget the rows."""

    def read(self, low: int, high: int) -> Tensor:
        """Refuse: no row comes from before a segment."""
        raise InternalError(f"window rows {low}..{high - 1} were read inside a training segment")


class _NoPairs:
    """Stands for the pair history: a document starts with an even position."""

    def store(self, first: int, values_TH: Tensor, gates_TH: Tensor) -> None:
        """Forget the rows."""


class DocumentState:
    """One document, or one decoder segment of it, as the layer code sees it."""

    def __init__(self, stores: dict[int, GraphStore], decoder_start: int, decoder_floor: int = 0) -> None:
        self.stores = stores
        self.decoder_floor = decoder_floor
        self._decoder_start = decoder_start
        self._ring = _NoRing()
        self._pairs = _NoPairs()

    def segment(self, floor: int) -> "DocumentState":
        """Return the same document seen by a decoder segment whose windows start at `floor`."""
        return DocumentState(self.stores, self._decoder_start, floor)

    def store_of(self, source: int | None) -> GraphStore:
        """Return the store of a KV source layer."""
        if source is None or source not in self.stores:
            raise InternalError(f"layer {source} is not a KV source")
        return self.stores[source]

    def floor(self, layer_id: int) -> int:
        """Return the first position that a query in a layer may look at through its window."""
        return self.decoder_floor if layer_id >= self._decoder_start else 0

    @property
    def rings(self) -> "_Same":
        """Window rings by layer."""
        return _Same(self._ring)

    @property
    def pairs(self) -> "_Same":
        """Pair histories by KV source."""
        return _Same(self._pairs)


class _Same:
    """A list in which every place holds the same thing."""

    def __init__(self, thing: _NoRing | _NoPairs) -> None:
        self._thing = thing

    def __getitem__(self, _place: int) -> _NoRing | _NoPairs:
        return self._thing
