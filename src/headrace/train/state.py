"""Everything that changes while a run goes on, in one place: what is saved, resumed, and gone back to after a spike."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.feed import Feed
from headrace.train.masters import Masters, init_masters
from headrace.train.mixture import Material
from headrace.train.optim.optimizer import Optimizer
from headrace.train.optim.ownership import Splits, family_rules, frozen_names
from headrace.train.recipe import Phase, Recipe
from headrace.train.save import Snapshot
from headrace.train.schedule import Position

INDEXER = ".attn.indexer."


class RunState:
    """Owns masters, optimizer state, place in the data, and counts.

    `position` is how far the run is, `num_skipped` how many of its steps changed nothing, `frozen` what no rule moves.
    """

    def __init__(self, recipe: Recipe, material: Material) -> None:
        """Stand before the first step.

        Raises:
            UserError: a parameter has no rule, or a pattern of the recipe matches none.
        """
        self.position = Position(steps=0, tokens=0)
        self.num_skipped = 0
        self.feed = Feed(recipe, material.stream)
        self.masters = _init_masters(recipe, material)
        self._num_experts = material.config.num_experts
        self._held = _always_frozen(recipe, self.masters)
        self.frozen = self._held
        self.optimizer = Optimizer(
            dict(self.masters.parameters),
            family_rules(recipe.family, recipe.group_changes),
            Splits.of(material.config),
            frozen=sorted(self._held),
            settings=recipe.optimizer,
        )

    def freeze_for(self, phase: Phase) -> None:
        """Freeze what a phase does not move; a parameter that moves again starts with fresh optimizer state."""
        names = frozenset(self.masters.parameters)
        indexer = frozenset(name for name in names if INDEXER in name)
        others = {"all": frozenset(), "backbone": indexer, "indexer": names - indexer}[phase.trains]
        self._freeze(self._held | others | frozen_names(names, phase.frozen))

    def _freeze(self, frozen: frozenset[str]) -> None:
        if frozen != self.frozen:
            self.optimizer.set_frozen(sorted(frozen))
            self.frozen = frozen

    def snapshot(self) -> Snapshot:
        """Return the whole state; its tensors are the ones in use, so write or copy them before the next step.

        No random generator is part of it: every draw is a function of seed, purpose and step.
        """
        tensors = {f"master/{name}": value.detach() for name, value in self.masters.parameters.items()}
        tensors |= {f"buffer/{name}": value for name, value in self.masters.buffers.items()}
        tensors |= {f"optimizer/{name}": value for name, value in self.optimizer.state_dict().items()}
        feed = self.feed.state()
        for place, record in enumerate(feed.get("routes", ())):
            tensors |= {f"routes/{place}/{name}": experts for name, experts in (record or {}).items()}
        plain = {
            "tokens": self.position.tokens,
            "skipped": self.num_skipped,
            "frozen": sorted(self.frozen),
            "feed": {name: value for name, value in feed.items() if name != "routes"},
        }
        return Snapshot(self.position.steps, tensors, plain)

    @torch.no_grad()
    def take_over(self, snapshot: Snapshot) -> None:
        """Go to a state of a run of the same recipe.

        Raises:
            UserError: a part is missing, or is of another model or another text.
        """
        parts: dict[str, dict[str, Tensor]] = {"master": {}, "buffer": {}, "optimizer": {}, "routes": {}}
        for key, tensor in snapshot.tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        plain = snapshot.plain
        copy_all("master", dict(self.masters.parameters), parts["master"])
        copy_all("buffer", self.masters.buffers, parts["buffer"])
        self._freeze(frozenset(plain["frozen"]))
        self.optimizer.load_state_dict(parts["optimizer"])
        feed = dict(plain["feed"])
        if "delta" in feed:
            feed["routes"] = _routes_by_place(parts["routes"], int(feed["delta"]) + 1)
        self.feed.restore(feed, self._num_experts)
        self.num_skipped = int(plain["skipped"])
        self.position = Position(steps=snapshot.step, tokens=int(plain["tokens"]))


def _init_masters(recipe: Recipe, material: Material) -> Masters:
    masters = init_masters(material.config, recipe.seed, embedding_deviation=recipe.embedding_deviation)
    with torch.no_grad():
        for name in frozen_names(masters.parameters, recipe.held_at_zero):
            masters.parameters[name].zero_()
    return masters


def _always_frozen(recipe: Recipe, masters: Masters) -> frozenset[str]:
    """Return what no phase moves: what is held at zero, and the indexer where no loss teaches it."""
    held = frozen_names(masters.parameters, recipe.held_at_zero)
    return held if recipe.losses.index else held | {name for name in masters.parameters if INDEXER in name}


def copy_all(what: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the tensors of their names.

    Raises:
        UserError: one is missing or has another shape.
    """
    for name, tensor in own.items():
        if name not in saved or saved[name].shape != tensor.shape:
            raise UserError(f"the resume state has no {what} {name} of shape {list(tensor.shape)}.", param="resume")
        tensor.copy_(saved[name])


def _routes_by_place(saved: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor] | None]:
    """Return the saved experts of every waiting batch, None for one without."""
    found: list[dict[str, Tensor] | None] = [None] * count
    for key, experts in saved.items():
        place, _, name = key.partition("/")
        found[int(place)] = {**(found[int(place)] or {}), name: experts}
    return found
