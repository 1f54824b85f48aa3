"""One optimizer over all update rules: one gradient norm, one clip, all rules step or none does.

Read `ownership.py` (who owns what) before. The learning rate comes with every step; schedules are elsewhere.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim.adamw import AdamW, AdamWSettings
from headrace.train.optim.muon import Muon, MuonSettings
from headrace.train.optim.ownership import Owner, Splits, assign, frozen_names
from headrace.train.optim.parameter import Owned, UpdateRule
from headrace.train.optim.reduction import square_sum, total
from headrace.train.optim.rules import Rule
from headrace.train.optim.sinkhorn import Sinkhorn, SinkhornSettings

_ADAM_STATES = 2  # moments that Adam keeps per parameter, for comparison


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Constants of all rules, and the bound on the norm of all gradients together.

    Attributes:
        clip: gradients are scaled down to this norm; None leaves them alone. No report gives a value.
    """

    muon: MuonSettings = field(default_factory=MuonSettings)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
    sinkhorn: SinkhornSettings = field(default_factory=SinkhornSettings)
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        """Refuse a bound outside its range.

        Raises:
            UserError: the bound is not a finite number above 0.
        """
        if self.clip is not None and not (self.clip > 0.0 and isfinite(self.clip)):
            raise UserError(f"Gradient clip is {self.clip}; a finite number above 0 or none is accepted.", param="clip")


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        grad_norm: norm of all gradients before clipping; not finite if they were not.
        factor: what gradients were multiplied with.
        is_skipped: nothing was changed, because the norm is not finite. The caller then also leaves routing biases and
            published tables alone.
    """

    grad_norm: float
    factor: float
    is_skipped: bool


@dataclass(frozen=True)
class StateBytes:
    """Memory of one update rule's state.

    Attributes:
        update: the rule.
        num_parameters: values it moves.
        num_bytes: bytes of its state.
        adam_bytes: bytes Adam's two moments would take for the same values.
    """

    update: str
    num_parameters: int
    num_bytes: int
    adam_bytes: int

    @property
    def per_parameter(self) -> float:
        """Bytes of state per value."""
        return self.num_bytes / self.num_parameters


class Optimizer:
    """All parameters of a model, each owned by exactly one rule or frozen.

    Numerics: the same bits for any number of threads: products have tiled shapes, sums one order.
    State: parameters are changed in place; gradients are read, and cleared by `zero_grad` alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rules: Iterable[Rule],
        splits: Splits,
        *,
        frozen: Collection[str] = (),
        settings: OptimizerSettings | None = None,
    ) -> None:
        """Find every parameter's owner and make its state.

        Args:
            parameters: official name -> float32 or float64 master parameter, contiguous.
            rules: a family's table.
            splits: counts behind the named splits of the table.
            frozen: names or patterns of parameters that nothing may move; they get no state.
            settings: constants of the rules.

        Raises:
            UserError: a parameter has no owner or two, cannot be used by its rule, is not contiguous, is no float
                tensor, or is the same memory as another one.
        """
        self._parameters = dict(parameters)
        self._rules_table = tuple(rules)
        self._splits = splits
        self._settings = settings or OptimizerSettings()
        _check_tensors(self._parameters)
        self._build(frozen)

    def _build(self, frozen: Collection[str]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        self._owners = assign(shapes, self._rules_table, self._splits, frozen)
        owned = {update: self._owned_by(update) for update in ("muon", "adamw", "sinkhorn")}
        self._rules: dict[str, UpdateRule] = {
            "muon": Muon(owned["muon"], self._settings.muon),
            "adamw": AdamW(owned["adamw"], self._settings.adamw),
            "sinkhorn": Sinkhorn(owned["sinkhorn"], self._settings.sinkhorn),
        }

    def _owned_by(self, update: str) -> list[Owned]:
        return [
            Owned(name, self._parameters[name], owner) for name, owner in self._owners.items() if owner.update == update
        ]

    @property
    def owners(self) -> Mapping[str, Owner]:
        """Owner of every parameter that is not frozen."""
        return dict(self._owners)

    def set_frozen(self, frozen: Collection[str]) -> None:
        """Freeze these parameters and no others.

        A parameter that becomes frozen loses its state; one that no longer is starts with fresh state.

        Raises:
            UserError: a name matches no parameter.
        """
        held = frozen_names(self._parameters, frozen)
        kept = {key: value for key, value in self.state_dict().items() if key.rpartition("/")[0] not in held}
        self._build(sorted(held))
        for key, value in self.state_dict().items():
            if key in kept:
                value.copy_(kept[key])

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters, frozen ones included."""
        for tensor in self._parameters.values():
            tensor.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> StepReport:
        """Clip all gradients together and let every rule take one step, or leave everything as it is.

        Args:
            rate: learning rate, at least 0.

        Returns:
            The norm and what was done; a norm that is not finite changes nothing.

        Raises:
            UserError: the rate is not a finite number of at least 0, or a parameter that is not frozen has no
                gradient, or a sparse one.

        Numerics: one norm over the gradients of all rules.
        """
        if not (isfinite(rate) and rate >= 0.0):
            raise UserError(f"Learning rate is {rate}; a finite number of at least 0 is accepted.", param="rate")
        norm = self.grad_norm()
        if not isfinite(norm):
            return StepReport(grad_norm=norm, factor=0.0, is_skipped=True)
        clip = self._settings.clip
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        for rule in self._rules.values():
            rule.step(rate, factor)
        return StepReport(grad_norm=norm, factor=factor, is_skipped=False)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the norm of the gradients of all parameters that are not frozen.

        Raises:
            UserError: one of them has no gradient, or a sparse one.
        """
        squares = [torch.zeros((), dtype=torch.float64)]
        for name in self._owners:
            gradient = self._parameters[name].grad
            if gradient is None:
                raise UserError(f"Parameter {name} has no gradient; freeze it, or give it one of zeros.", param=name)
            if gradient.layout != torch.strided:
                raise UserError(f"Parameter {name} has a sparse gradient; a dense one is accepted.", param=name)
            squares.append(square_sum(gradient))
        device = squares[-1].device
        return float(total(torch.stack([square.to(device) for square in squares]))) ** 0.5

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all rules as `parameter/rule.kind` -> the tensor in use (not a copy)."""
        state: dict[str, Tensor] = {}
        for rule in self._rules.values():
            state |= rule.state()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; steps after it give the bits they would have given.

        Raises:
            UserError: a tensor is missing, unexpected, or has another shape or dtype. Nothing is changed then.
        """
        own = self.state_dict()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            kind, key = ("lacks", missing[0]) if missing else ("holds", unexpected[0])
            raise UserError(
                f"Optimizer state {kind} {key}, {'and' if missing else 'but'} the parameters and rules of this run "
                f"{'need' if missing else 'do not use'} it.",
                param=key,
            )
        for key, value in own.items():
            if state[key].shape != value.shape or state[key].dtype != value.dtype:
                raise UserError(
                    f"Optimizer state {key} is {list(state[key].shape)} {state[key].dtype}; {list(value.shape)} "
                    f"{value.dtype} is accepted.",
                    param=key,
                )
        for key, value in own.items():
            value.copy_(state[key])

    def state_bytes(self) -> tuple[StateBytes, ...]:
        """Return the memory of every rule's state beside what Adam would take."""
        report = []
        for update, rule in self._rules.items():
            owned = self._owned_by(update)
            if owned:
                adam = sum(_ADAM_STATES * p.tensor.numel() * p.state_dtype().itemsize for p in owned)
                held = sum(tensor.numel() * tensor.element_size() for tensor in rule.state().values())
                report.append(StateBytes(update, sum(p.tensor.numel() for p in owned), held, adam))
        return tuple(report)


def _check_tensors(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters that no rule could move in place, or that would move twice."""
    seen: dict[tuple[int, torch.device], str] = {}
    for name, tensor in parameters.items():
        if tensor.dtype not in {torch.float32, torch.float64} or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
            raise UserError(
                f"Parameter {name} is {tensor.dtype} and {layout}; contiguous float32 or float64 values are accepted.",
                param=name,
            )
        if tensor.numel() == 0:
            raise UserError(
                f"Parameter {name} has shape {list(tensor.shape)}; at least one value is accepted.", param=name
            )
        key = (tensor.data_ptr(), tensor.device)
        if key in seen:
            raise UserError(f"Parameters {seen[key]} and {name} share their memory; one name is accepted.", param=name)
        seen[key] = name
