"""A window into a forward pass for tracing and comparison; serving runs without one."""

from typing import Protocol

from torch import Tensor

from headrace.models.deepseek_v41.batch import Rows


class Probe(Protocol):
    """Sees every layer's tensors, which hold while it is called, and may replace a layer's input."""

    def layer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Record the streams and the pending pre-mix that enter a layer; return what the layer shall use."""
        ...

    def producer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the decoder's KV producer shall use, also for rows on which the layer itself will not run."""
        ...

    def record(self, name: str, layer_id: int, rows: Rows, tensor: Tensor) -> None:
        """Record a tensor with one entry per row."""
        ...

    def record_selection(self, layer_id: int, rows: Rows, picked: list[Tensor], blocks: list[Tensor] | None) -> None:
        """Record an index source's picks [n, K] and kept blocks [n, B] of every segment (None: no candidates)."""
        ...
