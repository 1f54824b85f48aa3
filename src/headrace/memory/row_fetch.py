"""The rows of one layer for a batch of tokens, on their way from the cache and the source to bfloat16."""

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.memory.row_cache import RowCache
from headrace.memory.row_counts import RowReads
from headrace.memory.row_format import (
    ZERO_SCALE,
    RowIds,
    checked_row_ids,
    damage_error,
    damaged_rows,
    dequantise,
)
from headrace.memory.row_source import RowSource

_SLICE_ROWS = 8192  # rows dequantised at once


class LayerRows:
    """One layer of one table, as the store sees it: its source, its part of the cache, its counts.

    `first_key` is the cache's key of the table's row 0.
    """

    def __init__(self, source: RowSource, cache: RowCache | None, first_key: int, counts: RowReads) -> None:
        self.source, self.cache, self.first_key, self.counts = source, cache, first_key, counts


class LayerFetch:
    """One layer's rows for some tokens. Owns their buffers; `tokens` waits, once.

    Equal rows are fetched once. What the cache holds is copied at the start, because it may be gone at the end.
    """

    def __init__(self, layer: LayerRows, row_ids_TC: RowIds, *, is_urgent: bool) -> None:
        """Look into the cache and start to read what it does not hold.

        Raises:
            UserError: a row number is outside the table.
        """
        source, cache = layer.source, layer.cache
        flat = checked_row_ids(row_ids_TC, source.layer_id, source.rows)
        self._layer, self._shape = layer, row_ids_TC.shape
        unique, places = np.unique(flat, return_inverse=True)
        found = None if cache is None else cache.find(unique + layer.first_key)
        if found is not None and (found >= 0).any():  # missing rows first, so that they are read into one stretch
            hits, missing = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
            order = np.concatenate([missing, hits])
            position = np.empty(len(order), dtype=np.int64)
            position[order] = np.arange(len(order))
            self._ids, self._places, self._num_read = unique[order], position[places], len(missing)
        else:
            hits, self._ids, self._places, self._num_read = unique[:0], unique, places, len(unique)
        self._codes = np.empty((len(unique), source.head_dim), dtype=np.uint8)
        self._scales = np.empty((len(unique), source.head_dim // 32), dtype=np.uint8)
        count = self._num_read
        if cache is not None and found is not None and len(hits):
            cache.copy(found[hits], self._codes[count:], self._scales[count:])
        self._request = source.start(self._ids[:count], self._codes[:count], self._scales[:count], is_urgent=is_urgent)
        self._faults: dict[int, UserError] | None = None
        self._rows: Tensor | None = None
        row_bytes = source.head_dim + source.head_dim // 32
        layer.counts.add(
            RowReads(
                requested=len(flat),
                unique=len(unique),
                hits=len(flat) - count,
                read=count,
                read_bytes=count * row_bytes,
            )
        )

    @property
    def is_arrived(self) -> bool:
        """Whether `finish` would not wait, as far as the source can tell."""
        return self._faults is not None or self._request.is_done

    @property
    def has_failed(self) -> bool:
        """Whether it is known already that some of the rows are damaged or could not be read."""
        return bool(self._faults)

    def finish(self) -> dict[int, UserError]:
        """Wait for the rows, keep the good ones in the cache, and return the faults by place among the rows."""
        if self._faults is None:
            began = time.perf_counter()
            errors = self._request.wait()
            self._layer.counts.wait_s += time.perf_counter() - began
            self._faults = self._check(errors)
            if self._layer.cache is not None:
                self._keep(self._layer.cache, self._faults)
        return self._faults

    def tokens(self) -> tuple[Tensor, Mapping[int, UserError]]:
        """Wait for the rows.

        Returns:
            [T, C * head_dim] bfloat16, zeros in place of rows that are damaged or cannot be read, and the first fault
            of each token that has one.

        Numerics: see `row_format.dequantise`; the values depend on the stored bytes alone.
        """
        faults = self.finish()
        if self._rows is None:
            values = torch.empty((len(self._ids), self._layer.source.head_dim), dtype=torch.bfloat16)
            for start in range(0, len(self._ids), _SLICE_ROWS):
                part = slice(start, start + _SLICE_ROWS)
                dequantise(self._codes[part], self._scales[part], values[part])
            self._rows = values[torch.from_numpy(self._places)].view(self._shape[0], -1)
        return self._rows, self._by_token(faults)

    def _check(self, errors: Mapping[int, UserError]) -> dict[int, UserError]:
        count = self._num_read
        codes, scales = self._codes[:count], self._scales[:count]
        faults = dict(errors)
        for place in errors:
            codes[place], scales[place] = 0, ZERO_SCALE
        for place in damaged_rows(codes, scales).tolist():
            faults[place] = damage_error(self._layer.source.layer_id, int(self._ids[place]), scales[place])
            codes[place], scales[place] = 0, ZERO_SCALE
        return faults

    def _keep(self, cache: RowCache, faults: Mapping[int, UserError]) -> None:
        keys = self._ids[: self._num_read] + self._layer.first_key
        codes, scales = self._codes[: self._num_read], self._scales[: self._num_read]
        if faults:
            good = np.setdiff1d(np.arange(len(keys)), list(faults))
            keys, codes, scales = keys[good], codes[good], scales[good]
        cache.add(keys, codes, scales)

    def _by_token(self, faults: Mapping[int, UserError]) -> dict[int, UserError]:
        if not faults:
            return {}
        places = self._places.reshape(self._shape)
        found: dict[int, UserError] = {}
        for token, column in np.argwhere(np.isin(places, list(faults))).tolist():
            found.setdefault(token, faults[int(places[token, column])])
        return found
