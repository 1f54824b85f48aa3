"""Carries out a recipe, step by step. `Trainer` is a run in memory; `save.py` keeps it on disk, `run.py` does both.

Read `recipe.py`, `mixture.py`, `passes.py` and `objective.py` before.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.anticipatory import Observation, PassRouter, RouteRecord, RouteSource, Stability
from headrace.train.balance import LoadCounter, max_violation, update_bias
from headrace.train.data.draws import Draws
from headrace.train.evaluate import Evaluation, evaluate
from headrace.train.feed import Fed
from headrace.train.graph import DTYPES, GraphOptions, TrainGraph
from headrace.train.index_loss import IndexLossSettings, index_loss
from headrace.train.masters import Masters
from headrace.train.mixture import Material
from headrace.train.objective import Tally, balance_of, index_rows, judge
from headrace.train.optim.optimizer import StepReport
from headrace.train.passes import Passes, plan_passes
from headrace.train.recipe import Phase, Recipe
from headrace.train.save import Snapshot
from headrace.train.schedule import Position
from headrace.train.state import RunState

_KEPT = "kept"  # tensors of states to go back to, in a state to resume from


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step did; losses are means over the batch, `busiest` is the worst layer's `max_violation`."""

    step: int
    tokens: int
    loss: float
    loss_by_kind: Mapping[str, float]
    bits_per_byte: float | None
    index_loss: float | None
    index_shares: Mapping[str, float]
    balance_loss: float
    grad_norm: float
    rate: float
    phase: int
    sequence_length: int
    num_tokens: int
    busiest: float
    is_skipped: bool
    is_anticipated: bool
    went_back_to: int | None
    cpu_seconds: float


class Trainer:
    """Carries out steps; owns the state of the run (`state.py`) and, where spikes are answered, its snapshots.

    Invariant: the state after a step is a function of the recipe and the number of steps alone, on one machine.
    """

    def __init__(self, recipe: Recipe, material: Material) -> None:
        """Stand before the first step.

        Raises:
            UserError: the recipe cannot be run, or a parameter has no rule.
        """
        if recipe.obstacle is not None:
            raise UserError(f"recipe {recipe.name!r} cannot be run here: {recipe.obstacle}", param="recipe")
        self.recipe, self.material = recipe, material
        self.state = RunState(recipe, material)
        self._stability: Stability | None = None
        if recipe.stability is not None:
            self._stability = Stability(
                self._capture, self._go_back, settings=recipe.stability.rollback, detector=recipe.stability.detector
            )
            self._stability.begin(0)

    @property
    def masters(self) -> Masters:
        """The parameters as they are."""
        return self.state.masters

    @property
    def position(self) -> Position:
        """How far the run is."""
        return self.state.position

    @property
    def is_done(self) -> bool:
        """Whether the recipe's duration is over."""
        return self.position.in_unit(self.recipe.unit) >= self.recipe.duration

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.recipe.phase_at(self.position.steps, self.position.tokens)

    def step(self) -> StepRecord:
        """Take one step: gradients of the whole batch, one clip, all rules, then the routing biases.

        A step whose loss or gradients are not finite changes neither parameters nor biases; it counts as a step.
        """
        began = time.process_time()
        recipe, state, phase = self.recipe, self.state, self.phase
        position = state.position
        state.freeze_for(phase)
        self._anticipate()
        fed, routes = state.feed.next()
        plan = self._plan(fed)
        tally, counter = Tally(), LoadCounter(self.material.config.num_experts)
        self._add_gradients(plan, phase, tally, counter, routes)
        rate = recipe.learning_rate.at(position)
        report = self._move(rate, tally)
        loads = counter.take()
        if not report.is_skipped and phase.trains != "indexer":
            speed = recipe.bias_speed.at(position)
            for layer_id, load in loads.items():
                update_bias(self.masters.buffers[f"layers.{layer_id}.ffn.gate.bias"], load.text_E, speed)
        state.num_skipped += report.is_skipped
        state.position = Position(steps=position.steps + 1, tokens=position.tokens + plan.num_tokens)
        return StepRecord(
            step=state.position.steps,
            tokens=state.position.tokens,
            loss=tally.loss,
            loss_by_kind=tally.loss_by_kind,
            bits_per_byte=tally.bits_per_byte,
            index_loss=tally.index_loss,
            index_shares=tally.index_shares,
            balance_loss=tally.balance_loss,
            grad_norm=report.grad_norm,
            rate=rate,
            phase=recipe.phases.index(phase),
            sequence_length=fed.length,
            num_tokens=plan.num_tokens,
            busiest=max((max_violation(load.total) for load in loads.values()), default=0.0),
            is_skipped=report.is_skipped,
            is_anticipated=routes is not None,
            went_back_to=self._answer_spike(tally.loss, report.grad_norm, phase),
            cpu_seconds=time.process_time() - began,
        )

    def _plan(self, fed: Fed) -> Passes:
        """Cut a batch into passes; the same one at any time."""
        draws = Draws(self.recipe.seed, "passes", fed.position.steps)
        phase = self.recipe.phase_at(fed.position.steps, fed.position.tokens)
        weights = {
            task.name: setting.label_weight
            for task, setting in zip(self.material.tasks, self.recipe.tasks, strict=True)
        }
        window = phase.window or self.material.config.window
        return plan_passes(fed.batch, phase, window, self.recipe.micro_batch, draws, weights)

    @torch.inference_mode()
    def _anticipate(self) -> None:
        """Choose experts with today's parameters for the batches that wait; forget them when that is over."""
        if self._stability is None or not self._stability.is_anticipating:
            self.state.feed.forget_routes()
            return
        for place, fed in self.state.feed.unrouted():
            phase = self.recipe.phase_at(fed.position.steps, fed.position.tokens)
            graph, record = self._graph(phase), RouteRecord()
            for number, one in enumerate(self._plan(fed).passes):
                graph.forward(
                    one.documents, self._options(phase), self._router(cast("RouteSource", record.recorder(number)))
                )
            self.state.feed.store(place, record)

    def _router(self, source: RouteSource) -> PassRouter:
        return PassRouter(source, self.material.config.experts_per_token, self.material.config)

    def _answer_spike(self, loss: float, grad_norm: float, phase: Phase) -> int | None:
        """Return the step that the run went back to, None where it goes on."""
        if self._stability is None:
            return None
        observation = Observation(loss, grad_norm, phase=self.recipe.phases.index(phase))
        decision = self._stability.after_step(self.position.steps, observation)
        if decision.action == "give_up":
            raise UserError(
                f"the run does not get past a spike at step {self.position.steps} ({self._stability.last_alarm}); a "
                "lower learning rate is accepted.",
                param="learning_rate",
            )
        return decision.step if decision.action == "roll_back" else None

    def _add_gradients(
        self, plan: Passes, phase: Phase, tally: Tally, counter: LoadCounter, routes: RouteRecord | None
    ) -> None:
        """Run every pass forwards and backwards. Numerators add up; the batch's counts divide each once."""
        losses, graph = self.recipe.losses, self._graph(phase)
        is_taught = losses.index > 0 and phase.trains != "backbone"
        options = self._options(phase, has_records=is_taught)
        taught = self._graph(replace(phase, attention="sparse"))  # dense attention leaves no choice to teach
        looked_at = index_rows(plan, taught.plan, taught.config, losses.index_rows)
        self.state.optimizer.zero_grad()
        for number, one in enumerate(plan.passes):
            router = None if routes is None else self._router(cast("RouteSource", routes.player(number)))
            output = graph.forward(one.documents, options, router)
            judged = judge(output, one)
            tally.count(judged, one, plan.kind_names, self.material.bytes_V)
            balance = balance_of(output, one)
            tally.add_balance(float(balance.detach()), len(one.documents))
            loss = judged.numerator / (plan.weight or 1.0) + balance * (losses.balance / plan.num_documents)
            if phase.trains == "indexer":
                loss = torch.zeros(())  # neither of the two has a gradient that anything would follow
            if is_taught:
                settings = IndexLossSettings(pool=losses.index_pool, max_rows=losses.index_rows)
                key = (self.recipe.seed, self.position.steps, number)
                found = index_loss(taught, output, options, settings, key)
                tally.add_index(found)
                for source, part in found.items():
                    loss = loss + part.numerator * (losses.index / max(1, looked_at[source]))
            if loss.requires_grad:
                loss.backward()
            for layer_id, executed in enumerate(output.routes):
                counter.record(layer_id, number, executed.experts_TK)
        for name, parameter in self.masters.parameters.items():
            if name not in self.state.frozen and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _move(self, rate: float, tally: Tally) -> StepReport:
        if not isfinite(tally.loss):
            return StepReport(grad_norm=float("nan"), factor=0.0, is_skipped=True)
        return self.state.optimizer.step(rate)

    def _graph(self, phase: Phase) -> TrainGraph:
        """Return the model as a phase runs it, over the same masters."""
        config = self.material.config
        if not phase.has_candidates:
            config = replace(config, candidate_source=None)
        if phase.window is not None:
            config = replace(config, window=phase.window)
        if phase.attention == "dense":
            config = replace(config, index_topk=int(max(self.recipe.sequence_length.values)))
        return TrainGraph(Masters(config, self.masters.parameters, self.masters.buffers), self.material.addressing)

    def _options(self, phase: Phase, *, has_records: bool = False) -> GraphOptions:
        return GraphOptions(
            dtype=DTYPES[self.recipe.numerics],
            quant=phase.quant,
            has_records=has_records,
            has_checkpoints=self.recipe.has_recomputation,
        )

    def evaluate(self) -> Evaluation:
        """Judge the model as the latest step ran it."""
        phase = self.recipe.phase_at(max(0, self.position.steps - 1), max(0, self.position.tokens - 1))
        options = replace(self._options(phase), has_checkpoints=False)
        return evaluate(self._graph(phase), options, self.material, self.recipe, self.position.steps)

    def snapshot(self) -> Snapshot:
        """Return the whole state; its tensors are the ones in use, so write or copy them before the next step."""
        found = self.state.snapshot()
        if self._stability is None:
            return Snapshot(found.step, found.tensors, {**found.plain, "stability": None})
        captured = self._stability.captured()
        tensors = dict(found.tensors)
        for step, one in captured.items():
            tensors |= {f"{_KEPT}/{step}/{name}": value for name, value in one["tensors"].items()}
        kept = {str(step): one["plain"] for step, one in captured.items()}
        return Snapshot(found.step, tensors, {**found.plain, "stability": {**self._stability.state(), "kept": kept}})

    def restore(self, snapshot: Snapshot) -> None:
        """Take over a state of a run of the same recipe; the steps after it give the bits they would have given.

        Raises:
            UserError: a part is missing, or is of another model or another text.
        """
        self.state.take_over(snapshot)
        if self._stability is not None:
            stability = snapshot.plain["stability"]
            self._stability.load(stability, _kept(snapshot.tensors, stability["kept"]))

    def _capture(self) -> dict[str, Any]:
        found = self.state.snapshot()
        return {"step": found.step, "tensors": dict(found.tensors), "plain": dict(found.plain)}

    def _go_back(self, captured: dict[str, Any]) -> None:
        self.state.take_over(Snapshot(**captured))


def _kept(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[int, Any]:
    """Return the states that a run may go back to, as they were captured."""
    found: dict[int, Any] = {int(step): {"step": int(step), "tensors": {}, "plain": one} for step, one in plain.items()}
    for key, value in tensors.items():
        part, _, rest = key.partition("/")
        if part == _KEPT:
            step, _, name = rest.partition("/")
            found[int(step)]["tensors"][name] = value
    return found
