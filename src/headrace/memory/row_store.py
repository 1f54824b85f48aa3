"""The n-gram rows of a model, fetched ahead of the layers that need them.

Row numbers depend on token ids alone, so rows can be asked for long before a layer runs. `announce` starts to fetch
the rows of tokens that will run later: the next chunk of a prompt, a token that was just sampled. `collect` gives the
rows of the tokens that run now, announced or not, and waits only when a layer takes them. A wrong announcement costs
reads and nothing else: rows are matched by their numbers.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.memory.read_pool import ReadPool
from headrace.memory.row_cache import RowCache
from headrace.memory.row_counts import NgramReads
from headrace.memory.row_fetch import LayerFetch, LayerRows
from headrace.memory.row_format import RowIds
from headrace.memory.row_source import RowSource

_MAX_AHEAD = 4096  # announced tokens that wait to be run; at released sizes 52 MB of rows


@dataclass
class _Batch:
    """Rows of some tokens in every layer."""

    layers: list[LayerFetch]
    num_columns: int

    @property
    def has_failed(self) -> bool:
        """Whether it is known already that some rows are damaged or could not be read."""
        return any(layer.has_failed for layer in self.layers)


class RowStore:
    """Owns the sources, the row cache, the counts, and what was announced. One thread uses it."""

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        cache_bytes: int = 0,
        pool: ReadPool | None = None,
        max_ahead: int = _MAX_AHEAD,
    ) -> None:
        """Set up.

        Args:
            sources: of the layers with tables, in order.
            cache_bytes: budget of the row cache; 0 keeps nothing.
            pool: the sources' threads, to be ended with the store.
            max_ahead: announced tokens that are kept; the oldest are given up first.
        """
        self.sources, self._pool, self._max_ahead = tuple(sources), pool, max_ahead
        self.counts = NgramReads()
        self.cache_bytes = 0
        cache = None
        if cache_bytes and sources:
            cache = RowCache(cache_bytes, sources[0].head_dim, sources[0].head_dim // 32)
            self.cache_bytes = cache.num_bytes
        self._layers, first = [], 0
        for source in sources:
            self._layers.append(LayerRows(source, cache, first, self.counts.of(source.layer_id)))
            first += source.rows
        self._ahead: dict[bytes, tuple[_Batch, int]] = {}  # oldest first
        self._under_way: list[weakref.ref[LayerFetch]] = []

    def announce(self, row_ids_TLC: RowIds) -> None:
        """Start to fetch the rows of tokens that will run later.

        Args:
            row_ids_TLC: [T, layers, C] row numbers, as `Addressing.row_ids` gives them.

        Raises:
            UserError: a row number is outside its table.
        """
        self._take_in_arrived()
        fresh = {key: place for place, key in enumerate(_keys(row_ids_TLC)) if key not in self._ahead}
        if not fresh:
            return
        batch = self._begin(row_ids_TLC[list(fresh.values())], is_urgent=False)
        self._ahead |= {key: (batch, token) for token, key in enumerate(fresh)}
        while len(self._ahead) > self._max_ahead:
            self._give_up(self._ahead.pop(next(iter(self._ahead)))[0])

    def collect(self, row_ids_TLC: RowIds) -> "Collected":
        """Return the rows of tokens that run now; what was not announced, or failed since, starts here.

        Raises:
            UserError: a row number is outside its table.
        """
        self._take_in_arrived()
        keys = _keys(row_ids_TLC)
        for key in set(keys) & self._ahead.keys():
            if self._ahead[key][0].has_failed:  # the disk may be well again
                self._give_up(self._ahead.pop(key)[0])
        parts: dict[int, _Part] = {}
        missing: list[int] = []
        for place, key in enumerate(keys):
            found = self._ahead.get(key)
            if found is None:
                missing.append(place)
                continue
            part = parts.setdefault(id(found[0]), _Part(found[0]))
            part.places.append(place)
            part.tokens.append(found[1])
        for key in set(keys):
            self._ahead.pop(key, None)
        for part in parts.values():  # tokens alike that were announced once
            self._count_again(part)
        if missing:
            batch = self._begin(row_ids_TLC[missing], is_urgent=True)
            parts[id(batch)] = _Part(batch, missing, list(range(len(missing))))
        layer_ids = [source.layer_id for source in self.sources]
        return Collected(len(keys), layer_ids, list(parts.values()))

    def allow_ahead(self, max_ahead: int) -> None:
        """Keep at least this many announced tokens."""
        self._max_ahead = max(self._max_ahead, max_ahead)

    def forget(self) -> None:
        """Give up everything announced."""
        while self._ahead:
            self._give_up(self._ahead.popitem()[1][0])

    def close(self) -> None:
        """End the threads and close the files; the store is not used any more."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.close()
        for source in self.sources:
            source.close()

    def _begin(self, row_ids_TLC: RowIds, *, is_urgent: bool) -> _Batch:
        layers = [
            LayerFetch(layer, np.ascontiguousarray(row_ids_TLC[:, place]), is_urgent=is_urgent)
            for place, layer in enumerate(self._layers)
        ]
        self._under_way += map(weakref.ref, layers)
        return _Batch(layers, row_ids_TLC.shape[2])

    def _give_up(self, batch: _Batch) -> None:
        for source in self.sources:
            self.counts.of(source.layer_id).unused += batch.num_columns

    def _count_again(self, part: "_Part") -> None:
        rows = (len(part.tokens) - len(set(part.tokens))) * part.batch.num_columns
        for source in self.sources if rows else ():
            counts = self.counts.of(source.layer_id)
            counts.requested, counts.hits = counts.requested + rows, counts.hits + rows

    def _take_in_arrived(self) -> None:
        """Put rows that have arrived into the cache, so that the next batch finds them there."""
        still = []
        for reference in self._under_way:
            fetch = reference()  # None: given up, or taken and done with
            if fetch is not None and fetch.is_arrived:
                fetch.finish()
            elif fetch is not None:
                still.append(reference)
        self._under_way = still


@dataclass
class _Part:
    """Tokens `tokens` of a batch, which are `places` of what is collected."""

    batch: _Batch
    places: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Collected:
    """The rows of the tokens of one forward pass. `layer` waits for one layer's."""

    def __init__(self, num_tokens: int, layer_ids: Sequence[int], parts: Sequence[_Part]) -> None:
        self._num_tokens, self._layer_ids, self._parts = num_tokens, list(layer_ids), parts

    def layer(self, layer_id: int) -> tuple[Tensor, Mapping[int, UserError]]:
        """Wait for a layer's rows.

        Returns:
            [T, C * head_dim] bfloat16 on the CPU, zeros in place of rows that are damaged or cannot be read, and the
            first fault of each token that has one.
        """
        index = self._layer_ids.index(layer_id)
        found = [part.batch.layers[index].tokens() for part in self._parts]
        if len(found) == 1 and self._parts[0].tokens == list(range(len(found[0][0]))):
            return found[0]
        width = found[0][0].shape[1] if found else 0
        rows = torch.empty((self._num_tokens, width), dtype=torch.bfloat16)
        faults: dict[int, UserError] = {}
        for part, (values, errors) in zip(self._parts, found, strict=True):
            rows[torch.tensor(part.places)] = values[torch.tensor(part.tokens)]
            for token, place in zip(part.tokens, part.places, strict=True):
                if token in errors:
                    faults[place] = errors[token]
        return rows, faults


def _keys(row_ids_TLC: RowIds) -> list[bytes]:
    contiguous = np.ascontiguousarray(row_ids_TLC)
    size = contiguous[:1].nbytes
    raw = contiguous.tobytes()
    return [raw[start : start + size] for start in range(0, len(raw), size)] if size else []
