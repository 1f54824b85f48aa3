"""Global entries and index keys of one KV source: pooling, norms, key product, rotation, FP4 rounding, store.

One call per sequence writes the bytes of every entry that its new rows complete, and the value and gate of each row for
the pair that is still open.

Numerics: the softmax over two gates is e / (e + f) with exponentials relative to the larger gate; pooled values are one
product and one multiply-add, rounded once; norms, product and rotation as in `streams`, `product` and `rows`; values
are rounded to Q4K, keys to Q4I, after rotation.
Source: spec sections 3.4, 3.5 and 4.
"""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.native.library import Library
from headrace.kernels.native.tiles import Matrix

_FIELDS = (
    *("values", "gates", "latents", "history", "depth", "first", "count", "norm", "key", "key_norm", "cos", "sin"),
    *("codes", "scales", "key_codes", "key_scales", "blocks", "per_block", "row", "entries", "skipped"),
    *("width", "key_width", "rotated"),
)


class Job(ctypes.Structure):
    """Arguments of one call."""

    _fields_ = [*((name, ctypes.c_int64) for name in _FIELDS), ("eps", ctypes.c_double)]


@dataclass(frozen=True)
class NewRows:
    """What one sequence's new rows bring: positions `first` onwards, `entries` new entries from store row `row` on.

    `values` and `gates` [n, H] float32 and `history` [depth, 2, H] of a ratio-2 source; at ratio 1 `values` are the
    bfloat16 latents and the others None. `skipped` first entries are in the store already.
    """

    values: Tensor
    gates: Tensor | None
    history: Tensor | None
    first: int
    row: int
    entries: int
    skipped: int


@dataclass(frozen=True)
class Places:
    """Where entries go: four planes, block numbers int64 (None: in order), rows per block."""

    planes: tuple[Tensor, ...]
    blocks: Tensor | None
    per_block: int


class Compressor:
    """Norms [H] and [I] float32 and the key matrix of one KV source."""

    def __init__(
        self, library: Library, norm: Tensor, key: Matrix, key_norm: Tensor, *, rotated: int, eps: float
    ) -> None:
        self._kept = (norm, key, key_norm)
        self._job = Job(
            norm=norm.data_ptr(),
            key=key.address,
            key_norm=key_norm.data_ptr(),
            width=key.width,
            key_width=key.rows,
            rotated=rotated,
            eps=eps,
        )
        self._address = ctypes.addressof(self._job)
        self._run = library.function("hr_compress", 1)

    def __call__(self, new: NewRows, turn: tuple[Tensor, Tensor], places: Places) -> None:
        """Store the entries; `turn` are cosines and sines [entries, P / 2] of their positions.

        Raises:
            InternalError: there is no memory left.

        State: writes planes and history.
        """
        job, is_pair = self._job, new.gates is not None
        job.values = new.values.data_ptr() if is_pair else 0
        job.latents = 0 if is_pair else new.values.data_ptr()
        job.gates = 0 if new.gates is None else new.gates.data_ptr()
        job.history = 0 if new.history is None else new.history.data_ptr()
        job.depth = 1 if new.history is None else new.history.shape[0]
        job.first, job.count = new.first, new.values.shape[0]
        job.row, job.entries, job.skipped = new.row, new.entries, new.skipped
        job.cos, job.sin = turn[0].data_ptr(), turn[1].data_ptr()
        job.codes, job.scales, job.key_codes, job.key_scales = (plane.data_ptr() for plane in places.planes)
        job.blocks = 0 if places.blocks is None else places.blocks.data_ptr()
        job.per_block = places.per_block
        if self._run(self._address):
            raise InternalError("there is no memory left for new entries")
