"""What the planner knows of a model: weights by kind, what grows with the context, what is fixed, what a token reads.

Values only; `families/` derives them from configurations, everything else in the planner computes with them. Bytes are
those of the stored formats. Shares and bytes per token are exact fractions, rounded only when shown.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from headrace.core.spec import TensorSpec

Precision = Literal["bf16", "fp8", "fp4"]

EXPERTS = "routed experts"
TABLES = "n-gram tables"
DRAFT = "draft module"
VISION = "vision tower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """`count` equal tensors of one kind; `precision` None where rows are looked up, not multiplied with.

    `share` is the part of them that one decoded token reads.
    """

    spec: TensorSpec
    kind: str
    share: Fraction
    precision: Precision | None
    count: int = 1

    @property
    def parameters(self) -> int:
        """Logical parameters of all: none for scales and tables of integers, two per byte of packed FP4."""
        if self.spec.dtype in {"F8_E8M0", "I64"}:
            return 0
        return self.count * self.spec.num_elements * (2 if self.spec.dtype == "I8" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of one kind that run in one precision."""

    kind: str
    share: Fraction
    precision: Precision | None
    num_tensors: int
    parameters: int
    num_bytes: int


def group(tensors: Iterable[Tensors]) -> tuple[Weights, ...]:
    """Add up tensors of equal kind, share and precision, in order of first appearance."""
    sums: dict[tuple[str, Fraction, Precision | None], Counter[str]] = {}
    for one in tensors:
        total = sums.setdefault((one.kind, one.share, one.precision), Counter())
        total["tensors"] += one.count
        total["parameters"] += one.parameters
        total["bytes"] += one.count * one.spec.num_bytes
    return tuple(
        Weights(
            kind=kind,
            share=share,
            precision=precision,
            num_tensors=total["tensors"],
            parameters=total["parameters"],
            num_bytes=total["bytes"],
        )
        for (kind, share, precision), total in sums.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """Global KV of one kind: in each of `layers`, one entry of `entry_bytes` for every `ratio` tokens."""

    name: str
    layers: int
    entry_bytes: int
    ratio: int

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that a token adds, on average over `ratio` tokens."""
        return Fraction(self.layers * self.entry_bytes, self.ratio)

    def num_bytes(self, context: int) -> int:
        """Bytes at a context length; an entry exists once all its tokens do."""
        return self.layers * (context // self.ratio) * self.entry_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a sequence keeps whatever its length: `num_bytes` in each of `layers`.

    `is_read`: every decoded token reads all of it (a recurrent state).
    """

    name: str
    layers: int
    num_bytes: int
    is_read: bool = False

    @property
    def total(self) -> int:
        """Bytes in all layers."""
        return self.layers * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Rows that each of `layers` reads for one decoded token.

    Of the context's `context // ratio` rows, at most `limit` are read (None: all), and none while there are at most
    `free` of them (a selection that takes everything needs no scores). `pool_block` above 0: the limit counts whole
    blocks of that many rows, the newest of which may be partly filled. `flops` is per row, a multiply-add counts two.
    """

    name: str
    layers: int
    ratio: int
    row_bytes: int
    flops: int
    precision: Precision
    limit: int | None = None
    free: int = 0
    pool_block: int = 0

    def rows(self, context: int) -> int:
        """Rows read per layer by the token that makes the context this long, itself included."""
        rows = context // self.ratio
        if rows <= self.free:
            return 0
        if self.limit is None or rows <= self.limit:
            return rows
        return self.limit - self.pool_block + (rows - 1) % self.pool_block + 1 if self.pool_block else self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An n-gram table: `rows_per_token` of its rows are read for every token."""

    layer_id: int
    num_rows: int
    row_bytes: int
    rows_per_token: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole table."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One model.

    `experts` are those of a layer and those a token is routed to. `encoder_layers` of the `num_layers` run on every
    prompt token in bounded replay, with `prefill_parameters` (None where a family has no such mode). `window_tokens` is
    0 and `window` None where no layer has a window. `snapshot_bytes` is what resuming a sequence exactly needs besides
    global KV; None where the planner does not say.
    """

    name: str
    model_type: str
    max_positions: int
    num_layers: int
    streams: int
    hidden_size: int
    experts: tuple[int, int]
    weights: tuple[Weights, ...]
    growing: tuple[Growing, ...]
    window_tokens: int
    window: Fixed | None
    state: tuple[Fixed, ...]
    scans: tuple[Scan, ...]
    tables: tuple[Table, ...] = ()
    encoder_layers: int | None = None
    prefill_parameters: int | None = None
    snapshot_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def kv_bytes_per_token(self) -> Fraction:
        """Global KV bytes per token, as stored."""
        return sum((part.bytes_per_token for part in self.growing), Fraction(0))

    def kv_bytes(self, context: int) -> int:
        """Global KV bytes of one sequence."""
        return sum(part.num_bytes(context) for part in self.growing)

    @property
    def window_layers(self) -> int:
        """Layers that keep a window, draft layers among them where they are counted."""
        return self.window.layers if self.window else 0

    @property
    def window_bytes(self) -> int:
        """Bytes of one sequence's windows."""
        return self.window.total if self.window else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's other fixed state."""
        return sum(part.total for part in self.state)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return sum(part.num_bytes for part in self.weights)

    @property
    def parameters(self) -> int:
        """Parameters of the checkpoint, scales not counted."""
        return sum(part.parameters for part in self.weights)

    def num_bytes(self, *kinds: str) -> int:
        """Stored bytes of the weights of these kinds."""
        return sum(part.num_bytes for part in self.weights if part.kind in kinds)

    @property
    def active_parameters(self) -> int:
        """Parameters that a decoded token is multiplied with: routed share of the experts, no looked-up rows."""
        return int(sum(part.parameters * part.share for part in self.weights if part.precision))
