"""Trains a draft module step by step on a frozen backbone; `run.py` keeps it on disk as it keeps any run.

Read `draft_recipe.py`, `backbone.py` and `dspark.py` before.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.anchors import Anchors, draw_anchors
from headrace.train.backbone import Backbone, data_recipe, files_digest, with_draft
from headrace.train.balance import LoadCounter, max_violation, update_bias
from headrace.train.continuations import Target, continue_samples, cut_prompt, samples_of
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.draft_evaluate import HeldOut, collect, continue_rows, corpus_figures, greedy_figures, held_out_rows
from headrace.train.draft_export import Proof, export_draft
from headrace.train.draft_recipe import DraftRecipe
from headrace.train.dspark import DraftTrainer, backbone_digest
from headrace.train.evaluate import Evaluation
from headrace.train.feed import Feed
from headrace.train.graph import DTYPES, Document, GraphOptions, TrainGraph
from headrace.train.masters import Masters, init_masters
from headrace.train.mixture import gather_material
from headrace.train.optim.optimizer import Optimizer, StepReport
from headrace.train.optim.ownership import Splits, family_rules
from headrace.train.recipe_json import difference, to_json
from headrace.train.save import Snapshot
from headrace.train.schedule import Position
from headrace.train.state import copy_all
from headrace.train.summary import state_of, texts_of

DRAFT_PREFIX = "mtp."


@dataclass(frozen=True, kw_only=True)
class DraftRecord:
    """What one step did; losses are means over the batch, `acceptance` the mean chance of each draft in turn."""

    step: int
    tokens: int
    loss: float
    cross_entropy: float
    variation: float
    confidence: float
    acceptance: tuple[float, ...]
    expected_accepted: float
    grad_norm: float
    rate: float
    num_tokens: int
    num_anchors: int
    busiest: float
    is_skipped: bool
    cpu_seconds: float
    bits_per_byte: None = None
    went_back_to: None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """Documents that are run at once, their anchors, and how many rows they fill."""

    samples: tuple[Sample, ...]
    anchors: list[Anchors]


class DraftLoop:
    """A draft run in memory. Owns the draft's masters, its optimizer state, and the place in the data.

    Invariant: the state after a step is a function of recipe, backbone and number of steps alone, on one machine.
    """

    def __init__(self, recipe: DraftRecipe, backbone: Backbone, data: Mapping[str, Any] | None = None) -> None:
        """Stand before the first step.

        Args:
            recipe: what to do.
            backbone: stays as it is.
            data: what an earlier part of the run said that it read, as JSON; None where there was none.

        Raises:
            UserError: recipe and backbone do not fit each other, there is no text, or another one than before.
        """
        self.recipe, self.backbone = recipe, backbone
        self.config = with_draft(backbone.config, recipe.draft)
        self.data = data_recipe(recipe, backbone)
        if data is not None and (changed := difference(to_json(self.data), data)):
            raise UserError(f"the run was started on other data: {changed}; the same is accepted.", param="recipe")
        self.material = gather_material(self.data, backbone.tokenizer)
        self.feed = Feed(self.data, self.material.stream)
        fresh = init_masters(self.config, recipe.seed, prefix=DRAFT_PREFIX)
        self.masters = Masters(
            self.config,
            {**backbone.masters.parameters, **fresh.parameters},
            {**backbone.masters.buffers, **fresh.buffers},
        )
        self.drafts, self._biases = fresh.parameters, fresh.buffers
        self.optimizer = Optimizer(
            dict(self.drafts),
            family_rules("v4.1", recipe.rule_changes()),
            Splits.of(self.config),
            settings=recipe.optimizer,
        )
        graph = TrainGraph(self.masters, backbone.model.addressing)
        self.trainer = DraftTrainer(graph, recipe.losses, is_backbone_stored=True)
        self.options = GraphOptions(dtype=DTYPES[recipe.numerics], quant=recipe.quant)
        self._served = GraphOptions(dtype=DTYPES[recipe.numerics], quant=type(recipe.quant).everything())
        self.target = Target(backbone.model, backbone.num_ids)
        self._rows = held_out_rows(self.material, self.data, recipe)
        self.position, self.num_skipped = Position(steps=0, tokens=0), 0
        self.values_before, self.files_before = backbone_digest(self.masters), files_digest(backbone.catalog)

    @property
    def is_done(self) -> bool:
        """Whether the recipe's duration is over."""
        return self.position.steps >= self.recipe.duration

    def step(self) -> DraftRecord:
        """Take one step. One whose loss or gradients are not finite changes nothing; it counts as a step.

        Raises:
            UserError: no document of the batch is long enough for an anchor.
        """
        began = time.process_time()
        recipe, step = self.recipe, self.position.steps
        fed, _ = self.feed.next()
        parts = self._parts(samples_of(fed.batch), step)
        weights = [self.trainer.position_weights(part.anchors) for part in parts]
        denominator = float(sum(weight.double().sum() for weight in weights))
        if not parts:
            raise UserError(
                f"no document of step {step + 1} has {recipe.draft.block_size + 2} tokens that are asked in a row, so "
                "nothing can be drafted; longer rows or other text are accepted.",
                param="row_tokens",
            )
        self.optimizer.zero_grad()
        counter, sums, acceptance = LoadCounter(self._num_experts), np.zeros(4), []
        for number, part in enumerate(parts):
            run = self.trainer.run([Document(sample.token_ids) for sample in part.samples], part.anchors, self.options)
            loss = self.trainer.judge(run, part.anchors, denominator)
            loss.total.backward()
            sums += [float(loss.total.detach()), loss.cross_entropy, loss.variation, loss.confidence]
            acceptance.append(loss.acceptance_AX.double().numpy())
            for stage, routes in enumerate(run.routes):
                counter.record(stage, number, routes.experts_TK)
        return self._finish(parts, sums.tolist(), np.concatenate(acceptance), counter, fed.batch.num_tokens, began)

    def _parts(self, rows: list[list[Sample]], step: int) -> list[_Part]:
        recipe = self.recipe
        rows = self._regenerated(rows, step)
        parts = []
        for number, low in enumerate(range(0, len(rows), recipe.micro_rows)):
            some = rows[low : low + recipe.micro_rows]
            samples = tuple(sample for row in some for sample in row)
            draws = Draws(recipe.seed, "anchors", step, number)
            anchors = draw_anchors(samples, recipe.anchors_per_row * len(some), recipe.draft.block_size, draws)
            if anchors:
                parts.append(_Part(samples, anchors))
        return parts

    def _regenerated(self, rows: list[list[Sample]], step: int) -> list[list[Sample]]:
        """Let the backbone write the ends of some documents anew."""
        settings = self.recipe.continuations
        if settings.regenerated_share == 0.0 or step < settings.regenerated_from:
            return rows
        chosen, cuts, draws = [], [], []
        for row, samples in enumerate(rows):
            for place, sample in enumerate(samples):
                one = Draws(self.recipe.seed, "regenerate", step, row, place)
                cut = cut_prompt(sample, self.recipe.draft.block_size, one)
                if one.is_below(settings.regenerated_share) and cut is not None:
                    chosen.append((row, place))
                    cuts.append(cut)
                    draws.append(one)
        new = continue_samples(
            self.target,
            [rows[row][place] for row, place in chosen],
            cuts,
            draws,
            tokens=settings.tokens,
            temperature=settings.temperature,
        )
        replaced = dict(zip(chosen, new, strict=True))
        return [
            [replaced.get((row, place), sample) for place, sample in enumerate(samples)]
            for row, samples in enumerate(rows)
        ]

    def _finish(
        self,
        parts: Sequence[_Part],
        sums: list[float],
        acceptance_AX: np.ndarray,
        counter: LoadCounter,
        num_tokens: int,
        began: float,
    ) -> DraftRecord:
        """Move the draft and its experts' biases, and say what the step did."""
        recipe = self.recipe
        for parameter in self.drafts.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        rate = recipe.learning_rate.at(self.position)
        report = StepReport(grad_norm=float("nan"), factor=0.0, is_skipped=True)
        if isfinite(sums[0]):
            report = self.optimizer.step(rate)
        loads = counter.take()
        if not report.is_skipped:
            for stage, load in loads.items():
                bias = self._biases[f"{DRAFT_PREFIX}{stage}.ffn.gate.bias"]
                update_bias(bias, load.text_E, recipe.bias_speed.at(self.position))
        self.num_skipped += report.is_skipped
        self.position = Position(steps=self.position.steps + 1, tokens=self.position.tokens + num_tokens)
        valid = np.concatenate([one.valid for part in parts for one in part.anchors])
        held = acceptance_AX * valid
        return DraftRecord(
            step=self.position.steps,
            tokens=self.position.tokens,
            loss=sums[0],
            cross_entropy=sums[1],
            variation=sums[2],
            confidence=sums[3],
            acceptance=tuple((held.sum(0) / np.maximum(1, valid.sum(0))).tolist()),
            expected_accepted=float(np.cumprod(held, axis=1).sum() / len(held)),
            grad_norm=report.grad_norm,
            rate=rate,
            num_tokens=num_tokens,
            num_anchors=len(held),
            busiest=max((max_violation(load.total) for load in loads.values()), default=0.0),
            is_skipped=report.is_skipped,
            cpu_seconds=time.process_time() - began,
        )

    @property
    def _num_experts(self) -> int:
        return self.config.num_experts if self.config.draft is None else self.config.draft.num_experts

    @cached_property
    def judged(self) -> HeldOut:
        """What `evaluate` judges by."""
        return continue_rows(self.target, self._rows[0], self.recipe, "evaluation")

    @cached_property
    def fitted(self) -> HeldOut:
        """What calibration data is collected on."""
        return continue_rows(self.target, self._rows[1], self.recipe, "calibration")

    def evaluate(self) -> Evaluation:
        """Judge the draft as it is served, on what no step trains on."""
        figures = corpus_figures(self.trainer, self._served, self.judged.rows, self.recipe)
        found = collect(self.trainer, self._served, self.judged, self.recipe.draft.block_size)
        figures |= greedy_figures(found, [sample.kind for sample in self.judged.continued])
        return Evaluation(step=self.position.steps, values=figures)

    def summary(self) -> dict[str, Any]:
        """Return plain values about a run that begins or goes on: draft parameters, optimizer state, texts."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.drafts.values()),
            "optimizer_state": state_of(self.optimizer),
            "texts": texts_of(self.material.records),
        }

    def prove(self) -> str:
        """Hash the backbone once more and return the hash.

        Raises:
            UserError: it is not what it was before the first step.
        """
        after = backbone_digest(self.masters)
        if after != self.values_before:
            raise UserError(
                f"the backbone moved: its hash was {self.values_before} before the first step and is {after} now; "
                "nothing was saved.",
                param="backbone",
            )
        return after

    def export(self, out: Path) -> None:
        """Write the checkpoint: backbone and draft, the proof, and the calibration data.

        Raises:
            UserError: the backbone moved, or the folder cannot be written; CapacityError where the disk is full.
        """
        after = self.prove()
        found = collect(self.trainer, self._served, self.fitted, self.recipe.draft.block_size)
        proof = Proof(
            recipe=self.recipe.name,
            step=self.position.steps,
            backbone=str(self.backbone.folder),
            values_before=self.values_before,
            values_after=after,
            files_before=self.files_before,
            data=to_json(self.data),
        )
        export_draft(self.masters, self.backbone, out, proof, found)

    def snapshot(self) -> Snapshot:
        """Return the whole state but the backbone; its tensors are the ones in use."""
        tensors: dict[str, Tensor] = {f"master/{name}": value.detach() for name, value in self.drafts.items()}
        tensors |= {f"buffer/{name}": value for name, value in self._biases.items()}
        tensors |= {f"optimizer/{name}": value for name, value in self.optimizer.state_dict().items()}
        plain = {
            "tokens": self.position.tokens,
            "skipped": self.num_skipped,
            "feed": self.feed.state(),
            "values": self.values_before,
            "files": self.files_before,
            "backbone": str(self.backbone.folder),
            "data": to_json(self.data),
        }
        return Snapshot(self.position.steps, tensors, plain)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Take over a state of a run of the same recipe on the same backbone.

        Raises:
            UserError: the backbone is another one, or a part is missing or of another model or text.
        """
        plain = snapshot.plain
        if plain["values"] != self.values_before:
            raise UserError(
                f"the run was started on another backbone: its hash was {plain['values']}, that of "
                f"{self.backbone.folder} is {self.values_before}; the same one is accepted.",
                param="backbone",
            )
        parts: dict[str, dict[str, Tensor]] = {"master": {}, "buffer": {}, "optimizer": {}}
        for key, tensor in snapshot.tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        copy_all("master", dict(self.drafts), parts["master"])
        copy_all("buffer", self._biases, parts["buffer"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.feed.restore(dict(plain["feed"]), 0)
        self.num_skipped = int(plain["skipped"])
        self.position = Position(steps=snapshot.step, tokens=int(plain["tokens"]))
