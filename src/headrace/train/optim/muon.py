"""Muon: momentum, orthogonalised by a Newton-Schulz iteration that ends where all singular values are 1.

Equal shapes of all parameters are iterated together. Read `ownership.py` for what is one matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim.parameter import Owned

Coefficients = tuple[float, float, float]
FAST: Coefficients = (3.4445, -4.7750, 2.0315)  # steep at 0, but 1 goes to 0.701
EXACT: Coefficients = (2.0, -1.5, 0.5)  # 1 is a fixed point with slope 0
HYBRID: tuple[Coefficients, ...] = (FAST,) * 8 + (EXACT,) * 2

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROW_TILE, _COLUMN_TILE = 8, 16  # from these multiples on, no thread count changes a bit of the library's products


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Constants of the rule; the defaults are those of both reports.

    Attributes:
        momentum: decay of the momentum, which sums gradients unscaled: M <- momentum * M + G.
        rms: root mean square of the update per unit of learning rate.
        schedule: coefficients of every iteration.
        precision: dtype of the iteration. Parameters wider than float32 are iterated in their own dtype instead of
            "float32".
        max_batch: values iterated in one call; bounds memory, changes no bit.
    """

    momentum: float = 0.95
    rms: float = 0.18
    schedule: tuple[Coefficients, ...] = HYBRID
    precision: Literal["float32", "bfloat16"] = "float32"
    max_batch: int = 2**24

    def __post_init__(self) -> None:
        """Refuse constants outside their range.

        Raises:
            UserError: names the constant.
        """
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"Muon momentum is {self.momentum}; 0 up to below 1 is accepted.", param="momentum")
        if not (self.rms > 0.0 and isfinite(self.rms)):
            raise UserError(f"Muon rms is {self.rms}; a finite number above 0 is accepted.", param="rms")
        if self.precision not in _DTYPES:
            raise UserError(
                f"Muon precision is {self.precision!r}; {' or '.join(_DTYPES)} is accepted.", param="precision"
            )
        if not self.schedule or self.max_batch < 1:
            raise UserError("Muon needs at least one iteration and a batch of at least one value.", param="schedule")


def orthogonalize(x_BMN: Tensor, settings: MuonSettings) -> Tensor:
    """Return each matrix with its singular values brought to 1.

    Args:
        x_BMN: [B, M, N] float32 or float64; a zero matrix stays zero.
        settings: schedule and precision.

    Returns:
        [B, M, N] in the dtype of `x`.

    Numerics: divided by the Frobenius norm (summed in float64), then X <- aX + (bA + cA^2)X with A = XX^T for every
        triple of the schedule. A matrix gives the same bits alone and in any batch, for one thread and for several.
    State: none.
    Source: DeepSeek-V4 report, Muon with hybrid Newton-Schulz iterations.
    """
    is_tall = x_BMN.shape[1] > x_BMN.shape[2]
    wide = x_BMN.mT if is_tall else x_BMN
    batch, rows, columns = wide.shape
    padded = wide.new_zeros(batch, _up(rows, _ROW_TILE), _up(columns, _COLUMN_TILE))
    padded[:, :rows, :columns] = wide
    out = _iterate(padded, settings)[:, :rows, :columns]
    return out.mT if is_tall else out


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _iterate(x_BMN: Tensor, settings: MuonSettings) -> Tensor:
    """Run the schedule on matrices with M <= N in tiles; changes `x`."""
    norms_B = torch.linalg.vector_norm(x_BMN, dim=-1, dtype=torch.float64).square().sum(-1).sqrt()
    norms_B = torch.where(norms_B > 0.0, norms_B, 1.0)
    dtype = _DTYPES[settings.precision]
    x = x_BMN.div_(norms_B.to(x_BMN.dtype)[:, None, None])
    x = x.to(dtype) if dtype == torch.bfloat16 else x
    for a, b, c in settings.schedule:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(x_BMN.dtype)


@dataclass(frozen=True)
class _Slice:
    """Consecutive matrices of one parameter, somewhere in a batch."""

    index: int  # of the parameter
    first: int  # matrix of the parameter
    count: int


class Muon:
    """The rule over all parameters it owns; owns one momentum per parameter.

    State: momenta; parameters are changed in place.
    """

    def __init__(self, parameters: Sequence[Owned], settings: MuonSettings) -> None:
        self._parameters = tuple(parameters)
        self._settings = settings
        self._momenta = [parameter.new_state() for parameter in self._parameters]
        self._batches = tuple(_plan_batches(self._parameters, settings.max_batch))

    def state(self) -> dict[str, Tensor]:
        """Return the momenta under `parameter/muon.momentum`."""
        return {f"{p.name}/muon.momentum": m for p, m in zip(self._parameters, self._momenta, strict=True)}

    @torch.no_grad()
    def step(self, rate: float, factor: float) -> None:
        """Move every parameter: W <- (1 - rate decay) W - rate rms sqrt(max(m, n)) O, with rate times the group's.

        Args:
            rate: learning rate before the factor of a parameter's group.
            factor: what gradients are multiplied with first.
        """
        for parameter, momentum in zip(self._parameters, self._momenta, strict=True):
            momentum.mul_(self._settings.momentum).add_(parameter.gradient(), alpha=factor)
            if parameter.owner.decay:
                parameter.tensor.mul_(1.0 - rate * parameter.owner.rate * parameter.owner.decay)
        for batch in self._batches:
            self._step_batch(batch, rate, factor)

    def _step_batch(self, batch: tuple[_Slice, ...], rate: float, factor: float) -> None:
        """Iterate one batch of equal shapes and subtract the result from the parameters."""
        sources = [self._nesterov(piece, factor) for piece in batch]
        rows, columns = sources[0].shape[1:]
        buffer = sources[0].new_zeros(
            sum(piece.count for piece in batch), _up(rows, _ROW_TILE), _up(columns, _COLUMN_TILE)
        )
        start = 0
        for source in sources:
            buffer[start : start + source.shape[0], :rows, :columns] = source
            start += source.shape[0]
        del sources
        out = _iterate(buffer, self._settings)[:, :rows, :columns]
        start = 0
        for piece in batch:
            parameter = self._parameters[piece.index]
            target = _matrices(parameter.tensor, parameter.owner.matrices)[piece.first : piece.first + piece.count]
            update = out[start : start + piece.count]
            start += piece.count
            scale = rate * parameter.owner.rate * self._settings.rms * sqrt(columns)
            target.add_(update.mT if target.shape[1] > target.shape[2] else update, alpha=-scale)

    def _nesterov(self, piece: _Slice, factor: float) -> Tensor:
        """Return G + momentum * M of a slice, [count, m, n] with m <= n."""
        parameter = self._parameters[piece.index]
        window = slice(piece.first, piece.first + piece.count)
        gradient = _matrices(parameter.gradient(), parameter.owner.matrices)[window]
        momentum = _matrices(self._momenta[piece.index], parameter.owner.matrices)[window]
        mixed = (gradient * factor).add_(momentum, alpha=self._settings.momentum)
        return mixed.mT if mixed.shape[1] > mixed.shape[2] else mixed


def _matrices(tensor: Tensor, count: int) -> Tensor:
    """View a parameter as the [count, m, n] matrices of the rule."""
    return tensor if tensor.dim() == 3 else tensor.view(count, -1, tensor.shape[1])


def _plan_batches(parameters: Sequence[Owned], max_batch: int) -> list[tuple[_Slice, ...]]:
    """Put slices of equal shape, transposes counted as equal, into batches of at most `max_batch` values."""
    by_shape: dict[tuple[int, int, torch.dtype, torch.device], list[_Slice]] = {}
    for index, parameter in enumerate(parameters):
        matrices = _matrices(parameter.tensor, parameter.owner.matrices)
        short, long = sorted(matrices.shape[1:])
        key = (short, long, parameter.state_dtype(), parameter.tensor.device)
        by_shape.setdefault(key, []).append(_Slice(index, 0, matrices.shape[0]))
    batches: list[tuple[_Slice, ...]] = []
    for (short, long, _, _), slices in by_shape.items():
        room = max(1, max_batch // (short * long))
        batches.extend(_fill(slices, room))
    return batches


def _fill(slices: list[_Slice], room: int) -> list[tuple[_Slice, ...]]:
    """Cut slices into batches of `room` matrices, in order."""
    batches: list[tuple[_Slice, ...]] = []
    batch: list[_Slice] = []
    free = room
    for whole in slices:
        first = whole.first
        while first < whole.count:
            count = min(free, whole.count - first)
            batch.append(_Slice(whole.index, first, count))
            first, free = first + count, free - count
            if free == 0:
                batches.append(tuple(batch))
                batch, free = [], room
    return [*batches, tuple(batch)] if batch else batches
