"""From the tokens of a forward pass to the n-gram rows its layers take, and the same ahead of time.

The rows come from the row store where the model has one, and are waited for by the layer that takes them. Without one
they are looked up in the tables before the first layer: the slow path that the store is tested against.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headrace.core.errors import UserError
from headrace.memory.addressing import Addressing
from headrace.memory.row_store import Collected, RowStore
from headrace.memory.table import Table
from headrace.models.deepseek_v41.batch import Span

_MAX_KEPT_ROWS = 16  # of a span whose addresses are kept
_MAX_KEPT = 512


@dataclass(frozen=True)
class NgramMemory:
    """A model's n-gram memory: addresses, tables by layer id, and the store in front of them (None: look up).

    `kept` has the addresses of the newest short spans, by their tokens and what they look back on.
    """

    addressing: Addressing
    tables: dict[int, Table]
    store: RowStore | None
    kept: dict[tuple[int, bytes, bytes], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def begin(self, spans: Sequence[Span], *, is_tolerant: bool) -> "NgramRows":
        """Ask for the rows of the spans' tokens.

        Args:
            spans: of one forward pass.
            is_tolerant: damaged rows are zeros and noted in `NgramRows.faults` when a layer takes them; otherwise all
                rows are waited for here.

        Raises:
            UserError: a token id is outside the token map; where not tolerant, a row is damaged or cannot be read.
        """
        compressed, joined = self._row_ids(spans)
        if self.store is None:
            places = {layer_id: place for place, layer_id in enumerate(self.tables)}
            ready = {
                layer_id: table.lookup(joined[:, places[layer_id]]).flatten(1)
                for layer_id, table in self.tables.items()
            }
            return NgramRows(compressed, None, ready)
        collected = self.store.collect(joined)
        rows = NgramRows(compressed, collected, {}, [span.num_rows for span in spans])
        if not is_tolerant:
            for layer_id in self.tables:
                rows.wait(layer_id)
        if rows.faults:
            raise rows.faults[min(rows.faults)]
        return rows

    def announce(self, spans: Sequence[Span]) -> None:
        """Start to fetch the rows of the spans' tokens, which will run later.

        Args:
            spans: tokens that follow what their states hold now.

        Raises:
            UserError: a token id is outside the token map.
        """
        if self.store is None or not spans:
            return
        self.store.announce(self._row_ids(spans)[1])

    def announce_part(self, token_ids: np.ndarray, skip: int, is_image: np.ndarray | None) -> None:
        """Start to fetch the rows of a part of a prompt.

        Args:
            token_ids: [skip + n] the part, and before it the tokens that its n-grams look back on.
            skip: how many those are: `lookback`, or all from the start of the sequence.
            is_image: [skip + n] bool, the image tokens; None without any.

        Raises:
            UserError: a token id is outside the token map.
        """
        if self.store is None:
            return
        history = self.addressing.history(self.addressing.compress(token_ids, is_image), self.addressing.fresh())
        self.store.announce(self.addressing.row_ids(history[skip:]))

    def _row_ids(self, spans: Sequence[Span]) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the compressed ids of every span, and the row numbers [T, layers, C] of all their tokens."""
        found = [self._row_ids_of(span) for span in spans]
        return [compressed for compressed, _ in found], np.concatenate([row_ids for _, row_ids in found])

    def _row_ids_of(self, span: Span) -> tuple[np.ndarray, np.ndarray]:
        previous, images = span.state.previous_ids, span.images
        if images is not None or span.num_rows > _MAX_KEPT_ROWS:
            return self._address(span.token_ids, previous, None if images is None else images.is_image_T)
        key = (span.num_rows, span.token_ids.tobytes(), previous.tobytes())
        found = self.kept.pop(key, None)
        if found is None:  # asked for once before the step and once in it
            if len(self.kept) >= _MAX_KEPT:
                self.kept.clear()
            found = self.kept[key] = self._address(span.token_ids, previous, None)
        return found

    def _address(
        self, token_ids: np.ndarray, previous_ids: np.ndarray, is_image: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        compressed = self.addressing.compress(token_ids, is_image)
        return compressed, self.addressing.row_ids(self.addressing.history(compressed, previous_ids))


@dataclass
class NgramRows:
    """The n-gram rows of one forward pass.

    `compressed` are the spans' compressed ids; `faults` the first fault of each span, by its place, among the rows
    that layers took so far.
    """

    compressed: list[np.ndarray]
    collected: Collected | None
    ready: dict[int, Tensor]
    span_rows: list[int] = field(default_factory=list)
    faults: dict[int, UserError] = field(default_factory=dict)
    kept: Tensor | None = None

    def wait(self, layer_id: int) -> Tensor:
        """Return a layer's rows of all tokens, [T, C * head_dim] bfloat16 on the CPU."""
        if layer_id not in self.ready and self.collected is not None:
            rows, errors = self.collected.layer(layer_id)
            ends = np.cumsum(self.span_rows)
            for token in sorted(errors):
                self.faults.setdefault(int(np.searchsorted(ends, token, side="right")), errors[token])
            self.ready[layer_id] = rows
        return self.ready[layer_id]

    def take(self, layer_id: int, like: Tensor) -> Tensor:
        """Return a layer's rows of the tokens still alive, once, on the device and in the dtype of `like`."""
        rows = self.wait(layer_id)
        del self.ready[layer_id]
        rows = rows if self.kept is None else rows[self.kept.cpu()]
        return rows.to(like.device, like.dtype)

    def keep(self, index: Tensor) -> None:
        """Go on with the tokens at `index` only."""
        self.kept = index if self.kept is None else self.kept[index]
