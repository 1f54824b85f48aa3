"""The Sinkhorn-balanced update of V4.1 for embedding, head and n-gram tables: one momentum, balanced rows and columns.

The balanced matrix is never stored: it is diag(r) N diag(c), and only the vectors r and c are kept while a step runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim.parameter import Owned
from headrace.train.optim.reduction import column_sums, total

_BLOCK_VALUES = 2**18  # values of a table worked on at once: a megabyte of float32
_NEVER = -(2**62)


@dataclass(frozen=True, kw_only=True)
class SinkhornSettings:
    """Constants of the rule; the defaults are the report's.

    Attributes:
        momentum: decay of the momentum, an average: M <- momentum * M + (1 - momentum) * G.
        passes: normalisations; odd ones divide rows, even ones columns.
        threshold: rows of at most this share of the mean row norm, zero rows counted, stay where they are.
        eps: added to every norm.
        rms: root mean square of a moved row per unit of learning rate.
        touched_window: move only rows whose gradient was not zero in one of the last so many steps; None moves every
            row above the threshold, as reported. With small batches a row hit once would otherwise go on moving at
            full size until its momentum falls under the threshold, about 135 steps later.
    """

    momentum: float = 0.95
    passes: int = 11
    threshold: float = 1e-3
    eps: float = 1e-20
    rms: float = 0.18
    touched_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse constants outside their range.

        Raises:
            UserError: names the constant.
        """
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"Sinkhorn momentum is {self.momentum}; 0 up to below 1 is accepted.", param="momentum")
        if self.passes < 1 or self.passes % 2 == 0:
            raise UserError(f"Sinkhorn passes is {self.passes}; an odd count is accepted.", param="passes")
        if not 0.0 <= self.threshold < 1.0:
            raise UserError(f"Sinkhorn threshold is {self.threshold}; 0 up to below 1 is accepted.", param="threshold")
        if not 0.0 < self.eps < 1.0:
            raise UserError(f"Sinkhorn eps is {self.eps}; above 0 and below 1 is accepted.", param="eps")
        if not (self.rms > 0.0 and isfinite(self.rms)):
            raise UserError(f"Sinkhorn rms is {self.rms}; a finite number above 0 is accepted.", param="rms")
        if self.touched_window is not None and self.touched_window < 1:
            raise UserError(
                f"Sinkhorn touched_window is {self.touched_window}; a count of steps or none is accepted.",
                param="touched_window",
            )


@dataclass(frozen=True)
class Mixture:
    """N = momentum_weight * M + gradient_weight * G, computed row by row when asked for."""

    momentum_MN: Tensor
    gradient_MN: Tensor
    momentum_weight: float
    gradient_weight: float

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` of N."""
        mixed = self.momentum_MN[ids].mul_(self.momentum_weight)
        return mixed.add_(self.gradient_MN[ids], alpha=self.gradient_weight)

    def blocks(self, ids: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Walk through rows `ids` of N in blocks: first, last + 1 (as places in `ids`) and the rows."""
        size = max(1, _BLOCK_VALUES // self.momentum_MN.shape[1])
        for start in range(0, ids.numel(), size):
            stop = min(start + size, ids.numel())
            yield start, stop, self.rows(ids[start:stop])


def row_norms(mixture: Mixture) -> Tensor:
    """Return the norm of every row of N, [m] float64."""
    every = torch.arange(mixture.momentum_MN.shape[0], device=mixture.momentum_MN.device)
    norms = torch.empty(every.numel(), dtype=torch.float64, device=every.device)
    for start, stop, rows in mixture.blocks(every):
        norms[start:stop] = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms


def balance(
    mixture: Mixture, ids: Tensor, norms: Tensor, mean: float, settings: SinkhornSettings
) -> tuple[Tensor, Tensor]:
    """Return the vectors that balance rows `ids` of N: the update is diag(r) (N / mean) diag(c).

    Args:
        mixture: N, [m, n].
        ids: [k] rows that are not masked.
        norms: [k] float64, their norms.
        mean: mean norm of all rows; N is divided by it, so that gradients of any size stay in range.
        settings: passes and eps.

    Returns:
        r [k] and c [n] in the dtype of the momentum.

    Numerics: starts from N in every step. Norms of rows are the library's, of columns pairwise sums of squares; both
        vectors are updated in float64. `eps` acts as in U <- U / (norm(U) + eps).
    State: none.
    Source: DeepSeek-V4.1-Flash report, section 2.5, algorithm 1.
    """
    dtype = mixture.momentum_MN.dtype
    r = mean / (norms + settings.eps)
    c = torch.ones(mixture.momentum_MN.shape[1], dtype=torch.float64, device=ids.device)
    squares = _scaled_column_squares(mixture, ids, (r / mean).to(dtype))
    for _ in range(settings.passes // 2):
        c_norms = c * squares.sqrt()
        c = torch.where(c_norms > 0.0, c / (c_norms + settings.eps), c)  # a column of zeros stays one
        squares = torch.zeros_like(c)
        for start, stop, rows in mixture.blocks(ids):
            scaled = rows.div_(mean).mul_(c.to(dtype))
            r_norms = r[start:stop] * torch.linalg.vector_norm(scaled, dim=-1).double()
            r[start:stop] /= r_norms + settings.eps
            scaled.mul_(r[start:stop, None].to(dtype) / c.to(dtype))
            squares += column_sums(scaled.square_()).double()
    return r.to(dtype), c.to(dtype)
