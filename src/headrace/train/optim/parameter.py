"""One trained parameter as its update rule sees it, and what every rule has in common."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.train.optim.ownership import Owner


@dataclass(frozen=True)
class Owned:
    """A parameter, its name and its owner."""

    name: str
    tensor: Tensor
    owner: Owner

    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the state kept for it: float32, or the parameter's own if that is wider."""
        return torch.promote_types(self.tensor.dtype, torch.float32)

    def new_state(self) -> Tensor:
        """Return zeros of the parameter's shape in the dtype of its state."""
        return torch.zeros(self.tensor.shape, dtype=self.state_dtype(), device=self.tensor.device)

    def gradient(self) -> Tensor:
        """Return the gradient in the dtype of the state; `Optimizer` has checked that there is one."""
        return self.tensor.grad.to(self.state_dtype())  # type: ignore[union-attr]  # checked before any rule runs


class UpdateRule(Protocol):
    """One update rule over the parameters it owns."""

    def step(self, rate: float, factor: float) -> None:
        """Move the parameters and their state by one step.

        Args:
            rate: learning rate before the factor of a parameter's group.
            factor: what gradients are multiplied with first (clipping).
        """

    def state(self) -> dict[str, Tensor]:
        """Return the state as the tensors in use, under `parameter/kind` names."""
