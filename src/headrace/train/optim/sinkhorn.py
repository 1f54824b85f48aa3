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
_NEVER = -(2**30)  # a step so long ago that no window reaches it


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
    """N = momentum_weight * M + gradient_weight * G of a table, computed for a few rows when asked for."""

    momentum_MN: Tensor
    gradient_MN: Tensor
    momentum_weight: float
    gradient_weight: float

    def blocks(self, ids_K: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Walk through rows `ids` of N in blocks: the places in `ids`, and the rows."""
        size = max(1, _BLOCK_VALUES // self.momentum_MN.shape[1])
        is_all = ids_K.numel() == self.momentum_MN.shape[0]
        for start in range(0, ids_K.numel(), size):
            places = slice(start, min(start + size, ids_K.numel()))
            momentum, gradient = (
                table[places] if is_all else table.index_select(0, ids_K[places])
                for table in (self.momentum_MN, self.gradient_MN)
            )
            yield places, (momentum * self.momentum_weight).add_(gradient, alpha=self.gradient_weight)


def row_norms(mixture: Mixture) -> Tensor:
    """Return the norm of every row of N, [m] float64."""
    num_rows = mixture.momentum_MN.shape[0]
    every = torch.arange(num_rows, device=mixture.momentum_MN.device)
    norms = torch.zeros(num_rows, dtype=torch.float64, device=every.device)
    for places, rows in mixture.blocks(every):
        norms[places] = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms


def balance(
    mixture: Mixture, ids_K: Tensor, norms_K: Tensor, mean: float, settings: SinkhornSettings
) -> tuple[Tensor, Tensor]:
    """Return the vectors that balance the rows `ids` of N: the update is diag(r) (N / mean) diag(c).

    Args:
        mixture: N, [m, n].
        ids_K: the rows that are not masked, ascending.
        norms_K: [k] float64, their norms.
        mean: mean norm of all rows; N is divided by it, so that gradients of any size stay in range.
        settings: passes and eps.

    Returns:
        r [k] and c [n], float64.

    Numerics: starts from N in every step, no vector is carried over. Scaled values are in the dtype of the momentum,
        both vectors in float64. A pass is U <- U / (norm(U) + eps), written as an update of one vector. Sums have one
        order for any number of threads.
    State: none.
    Source: DeepSeek-V4.1-Flash report, section 2.5, algorithm 1.
    """
    dtype = mixture.momentum_MN.dtype
    r = mean / (norms_K + settings.eps)
    c = torch.ones(mixture.momentum_MN.shape[1], dtype=torch.float64, device=ids_K.device)
    if settings.passes == 1:
        return r, c
    squares = torch.zeros_like(c)
    for places, rows in mixture.blocks(ids_K):
        squares += _column_squares(rows.div_(mean), r[places])
    for _ in range(settings.passes // 2):
        column_norms = c * squares.sqrt()
        c = torch.where(column_norms > 0.0, c / (column_norms + settings.eps), c)  # a column of zeros stays one
        squares = torch.zeros_like(c)
        for places, rows in mixture.blocks(ids_K):
            scaled = rows.div_(mean)
            norms = torch.linalg.vector_norm(scaled * c.to(dtype), dim=-1).double()
            r[places] /= r[places] * norms + settings.eps
            squares += _column_squares(scaled, r[places])
    return r, c


def _column_squares(rows_KN: Tensor, r_K: Tensor) -> Tensor:
    """Return the sum over rows of (r N)^2, [n] float64; changes the rows."""
    return column_sums(rows_KN.mul_(r_K.to(rows_KN.dtype)[:, None]).square_()).double()


class Sinkhorn:
    """The rule over all tables it owns; owns one momentum per table, and with a touched window one step per row.

    State: momenta, step counts, last touched steps; tables are changed in place.
    """

    def __init__(self, parameters: Sequence[Owned], settings: SinkhornSettings) -> None:
        self._parameters = tuple(parameters)
        self._settings = settings
        self._momenta = [parameter.new_state() for parameter in self._parameters]
        self._steps = [torch.zeros((), dtype=torch.int64) for _ in self._parameters]
        self._touched = [
            torch.full(p.tensor.shape[:1], _NEVER, dtype=torch.int32, device=p.tensor.device)
            for p in (self._parameters if settings.touched_window else ())
        ]

    def state(self) -> dict[str, Tensor]:
        """Return the state under `parameter/sinkhorn.momentum`, `.step` and `.touched`."""
        state: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            state[f"{parameter.name}/sinkhorn.momentum"] = self._momenta[index]
            if self._touched:
                state[f"{parameter.name}/sinkhorn.step"] = self._steps[index]
                state[f"{parameter.name}/sinkhorn.touched"] = self._touched[index]
        return state

    @torch.no_grad()
    def step(self, rate: float, factor: float) -> None:
        """Move every table: W <- W - rate rms sqrt(n) U for the rows that are not masked; no decay.

        Args:
            rate: learning rate before the factor of a parameter's group.
            factor: what gradients are multiplied with first.
        """
        for index, parameter in enumerate(self._parameters):
            gradient, momentum = parameter.gradient(), self._momenta[index]
            weight = (1.0 - self._settings.momentum) * factor
            momentum.mul_(self._settings.momentum).add_(gradient, alpha=weight)
            mixture = Mixture(momentum, gradient, self._settings.momentum, weight)
            norms = row_norms(mixture)
            mean = float(total(norms)) / max(1, norms.numel())
            if mean < torch.finfo(momentum.dtype).tiny:
                keep = torch.zeros_like(norms, dtype=torch.bool)
            else:
                keep = norms > self._settings.threshold * mean
            keep &= self._recently_touched(index, gradient)
            ids = keep.nonzero().flatten()
            if ids.numel():
                own_rate = rate * parameter.owner.rate * self._settings.rms
                self._move(parameter.tensor, mixture, ids, norms[ids], mean, own_rate)

    def _recently_touched(self, index: int, gradient: Tensor) -> Tensor:
        """Note which rows have a gradient; return those that had one within the window, or all."""
        if self._settings.touched_window is None:
            return torch.ones(gradient.shape[0], dtype=torch.bool, device=gradient.device)
        now = int(self._steps[index].add_(1))
        touched = self._touched[index]
        touched[(gradient != 0).any(dim=-1)] = now
        return touched > now - self._settings.touched_window

    def _move(self, table: Tensor, mixture: Mixture, ids: Tensor, norms: Tensor, mean: float, rate: float) -> None:
        """Subtract rate sqrt(n) diag(r) N diag(c) from rows `ids` of a table."""
        r, c = balance(mixture, ids, norms, mean, self._settings)
        for places, rows in mixture.blocks(ids):
            scaled = rows.div_(mean).mul_(c.to(rows.dtype)).mul_(r[places, None].to(rows.dtype))
            table.index_add_(0, ids[places], scaled.to(table.dtype), alpha=-rate * sqrt(table.shape[1]))
