"""AdamW for vectors: gains, biases, sinks; decay decoupled and per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim.parameter import Owned

_PART = 2**18  # values moved at once: what all passes over them touch stays in the cache


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Constants of the rule; the defaults are those of both reports."""

    mean_decay: float = 0.9
    square_decay: float = 0.95
    eps: float = 1e-20

    def __post_init__(self) -> None:
        """Refuse constants outside their range.

        Raises:
            UserError: names the constant.
        """
        for name, value in (("mean_decay", self.mean_decay), ("square_decay", self.square_decay)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"AdamW {name} is {value}; 0 up to below 1 is accepted.", param=name)
        if not 0.0 < self.eps < 1.0:
            raise UserError(f"AdamW eps is {self.eps}; above 0 and below 1 is accepted.", param="eps")


class AdamW:
    """The rule over all parameters it owns; owns two moments and a step count per parameter.

    Numerics: elementwise, with both moments corrected for their start at zero, as `torch.optim.AdamW`.
    State: moments and counts; parameters are changed in place.
    """

    def __init__(self, parameters: Sequence[Owned], settings: AdamWSettings) -> None:
        self._parameters = tuple(parameters)
        self._settings = settings
        self._means = [parameter.new_state() for parameter in self._parameters]
        self._squares = [parameter.new_state() for parameter in self._parameters]
        self._steps = [torch.zeros((), dtype=torch.int64) for _ in self._parameters]

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts under `parameter/adamw.mean`, `.square` and `.step`."""
        state: dict[str, Tensor] = {}
        for index, parameter in enumerate(self._parameters):
            state[f"{parameter.name}/adamw.mean"] = self._means[index]
            state[f"{parameter.name}/adamw.square"] = self._squares[index]
            state[f"{parameter.name}/adamw.step"] = self._steps[index]
        return state

    @torch.no_grad()
    def step(self, rate: float, factor: float) -> None:
        """Move every parameter.

        Args:
            rate: learning rate before the factor of a parameter's group.
            factor: what gradients are multiplied with first.
        """
        for index, parameter in enumerate(self._parameters):
            own_rate = rate * parameter.owner.rate
            constants = self._constants(int(self._steps[index].add_(1)), own_rate, parameter.owner.decay, factor)
            flat = parameter.tensor.view(-1), parameter.gradient().reshape(-1)
            moments = self._means[index].view(-1), self._squares[index].view(-1)
            parts = [values.split(_PART) for values in (*flat, *moments)]
            for values, gradient, mean, square in zip(*parts, strict=True):
                _update(values, gradient, mean, square, constants)

    def _constants(self, count: int, rate: float, decay: float, factor: float) -> "_Constants":
        """Work out the numbers of one step of one parameter; `count` is the number of its steps, this one included."""
        beta1, beta2 = self._settings.mean_decay, self._settings.square_decay
        return _Constants(
            beta1=beta1,
            beta2=beta2,
            mean_weight=(1.0 - beta1) * factor,
            square_weight=(1.0 - beta2) * factor * factor,
            kept=1.0 - rate * decay,
            rate=rate / (1.0 - beta1**count),
            root=sqrt(1.0 - beta2**count),
            eps=self._settings.eps,
        )


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """Numbers of one step: decays and weights of the moments, share of the value kept, rate, root of the correction."""

    beta1: float
    beta2: float
    mean_weight: float
    square_weight: float
    kept: float
    rate: float
    root: float
    eps: float


def _update(values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, by: _Constants) -> None:
    """Move some values of one parameter and their moments."""
    mean.mul_(by.beta1).add_(gradient, alpha=by.mean_weight)
    square.mul_(by.beta2).addcmul_(gradient, gradient, value=by.square_weight)
    root = square.sqrt().div_(by.root).add_(by.eps)
    if by.kept != 1.0:
        values.mul_(by.kept)
    values.addcdiv_(mean, root, value=-by.rate)
