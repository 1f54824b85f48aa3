"""Where a pass takes its experts from: its own scores, choices cached some steps ago, or choices of a rollout.

One interface serves all three. Weights are always today's scores of the executed experts, gathered from the dense
scores, so that an expert the scores no longer favour keeps its gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.kernels.route_topk import Routes, weigh
from headrace.models.deepseek_v41.block import live_router
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import MoeWeights

Kind = Literal["live", "cached", "replay"]
_MAX_EXPERTS = 2**15  # int16


class RouteSource(Protocol):
    """Decides which experts a layer of one pass executes."""

    kind: Kind

    def choose(self, layer: int, live_TK: Tensor) -> Tensor:
        """Return the experts to execute, [T, K] int64, ascending per token.

        Args:
            layer: place of the layer among those with experts, in order of the pass.
            live_TK: [T, K] int64, what the layer's own biased scores select.
        """


class LiveRoutes:
    """Executes what the scores select."""

    kind: Kind = "live"

    def choose(self, layer: int, live_TK: Tensor) -> Tensor:  # noqa: ARG002  # one interface for all sources
        """Return the live choice itself."""
        return live_TK


@dataclass
class RouteRecord:
    """Experts chosen for one batch: per micro-batch and layer [T, K] int16."""

    experts: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def recorder(self, micro_batch: int = 0) -> "Recorder":
        """Return a source that executes the live choice and keeps it here."""
        return Recorder(self, micro_batch)

    def player(self, micro_batch: int = 0, kind: Kind = "cached") -> "Player":
        """Return a source that executes what is kept here."""
        return Player(self, micro_batch, kind)

    def state(self) -> dict[str, Tensor]:
        """Return the choices under `micro_batch/layer` names."""
        return {f"{micro}/{layer}": experts for (micro, layer), experts in self.experts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], num_experts: int) -> "RouteRecord":
        """Build a record from saved choices, or from those of a rollout.

        Raises:
            UserError: a name is not `micro_batch/layer`, or a choice is not [T, K] distinct experts in ascending order
                below `num_experts`.
        """
        record = cls()
        for name, experts in state.items():
            micro, _, layer = name.partition("/")
            if not (micro.isdecimal() and layer.isdecimal()):
                raise UserError(f"Recorded routes have a part named {name!r}; micro-batch/layer is accepted.")
            if experts.dim() != 2 or experts.is_floating_point():
                raise UserError(
                    f"Recorded routes {name} are {list(experts.shape)} {experts.dtype}; [T, K] integers are."
                )
            is_ascending = bool((experts[:, 1:] > experts[:, :-1]).all())
            is_inside = experts.numel() == 0 or 0 <= int(experts.min()) <= int(experts.max()) < num_experts
            if not (is_ascending and is_inside):
                raise UserError(
                    f"Recorded routes {name} are accepted as distinct ascending experts from 0 to {num_experts - 1}."
                )
            record.experts[int(micro), int(layer)] = experts.to(torch.int16)
        return record


@dataclass(frozen=True)
class Recorder:
    """Executes the live choice and keeps it in a record."""

    record: RouteRecord
    micro_batch: int
    kind: Kind = "live"

    def choose(self, layer: int, live_TK: Tensor) -> Tensor:
        """Keep and return the live choice."""
        self.record.experts[self.micro_batch, layer] = live_TK.detach().to(torch.int16)
        return live_TK


@dataclass(frozen=True)
class Player:
    """Executes the choices of a record; the live choice only says how many tokens there are."""

    record: RouteRecord
    micro_batch: int
    kind: Kind

    def choose(self, layer: int, live_TK: Tensor) -> Tensor:
        """Return the recorded choice.

        Raises:
            UserError: the record lacks the layer, or was made for another number of tokens or experts per token.
        """
        kept = self.record.experts.get((self.micro_batch, layer))
        if kept is None:
            raise UserError(f"Recorded routes lack layer {layer} of micro-batch {self.micro_batch}.")
        if kept.shape != live_TK.shape:
            raise UserError(
                f"Recorded routes of layer {layer} are for {list(kept.shape)} tokens and experts; this pass has "
                f"{list(live_TK.shape)}."
            )
        return kept.to(live_TK)


class PassRouter:
    """A `Router` of the model for one forward pass and its backward pass.

    Layers are numbered in the order of their first call. A layer that is run again while gradients are computed is
    recognised by its weights, whatever the order.

    State: the layers seen.
    """

    def __init__(self, source: RouteSource, count: int, config: Config) -> None:
        if config.num_experts > _MAX_EXPERTS:
            raise UserError(f"Routes of {config.num_experts} experts; at most {_MAX_EXPERTS} are accepted.")
        self._source, self._scale = source, config.route_scale
        self._live = live_router(count, config)
        self._layers: dict[int, tuple[int, MoeWeights]] = {}  # keeps the weights alive: an address names one object

    def __call__(self, u_TD: Tensor, weights: MoeWeights, is_image: Tensor | None) -> Routes:
        """Choose experts for rows [T, D]."""
        live = self._live(u_TD, weights, is_image)
        layer, _ = self._layers.setdefault(id(weights), (len(self._layers), weights))
        chosen_TK = self._source.choose(layer, live.experts_TK)
        return live if chosen_TK is live.experts_TK else weigh(live.scores_TE, chosen_TK, self._scale)
