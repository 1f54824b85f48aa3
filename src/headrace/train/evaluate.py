"""Judges a model on what it never trained on: held-out text in bits per byte, generated tasks by right answers.

Documents are seen whole and with the quantisers of the phase, so a figure says what serving in full mode would give.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.core.errors import InternalError
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Batch, PackedRow, stack_rows
from headrace.train.data.stream import task_row
from headrace.train.data.tasks.task import Task
from headrace.train.graph import GraphOptions, TrainGraph
from headrace.train.mixture import Material
from headrace.train.objective import Tally, judge
from headrace.train.passes import Pass, plan_passes
from headrace.train.recipe import Phase, Recipe

_NEVER_A_STEP = -1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures by name: `held_out_loss` (nats per token), `held_out_bits_per_byte`, `accuracy.KIND`, `loss.KIND`."""

    step: int
    values: dict[str, float]


@torch.no_grad()
def evaluate(graph: TrainGraph, options: GraphOptions, material: Material, recipe: Recipe, step: int) -> Evaluation:
    """Judge the masters of a graph.

    Args:
        graph: the model; records and recomputation of the options are not used.
        options: dtype and quantisers.
        material: held-out rows and tasks. Task rows are those of a step that no run takes.
        recipe: sizes and seed.
        step: for the record.

    State: none; the same state gives the same figures.
    """
    length = int(max(recipe.sequence_length.values))
    values: dict[str, float] = {}
    if material.held_out:
        tally, _ = _tally(graph, options, material, material.held_out, recipe)
        values["held_out_loss"] = tally.loss
        if tally.bits_per_byte is not None:
            values["held_out_bits_per_byte"] = tally.bits_per_byte
    for task in material.tasks:
        rows = task_rows(task, recipe, length, material.config.pad_token_id)
        if rows:
            tally, accuracy = _tally(graph, options, material, rows, recipe)
            values |= {f"accuracy.{task.name}": accuracy, f"loss.{task.name}": tally.loss}
    return Evaluation(step=step, values=values)


def task_rows(task: Task, recipe: Recipe, length: int, pad_id: int) -> list[PackedRow]:
    """Return the rows a task is judged by; no step trains on them."""
    count = recipe.evaluation.task_rows
    return [task_row(task, recipe.seed, _NEVER_A_STEP, row, length, pad_id) for row in range(count)]


def _tally(
    graph: TrainGraph, options: GraphOptions, material: Material, rows: Sequence[PackedRow], recipe: Recipe
) -> tuple[Tally, float]:
    """Run rows; return the sums and the share of answers that are right in every token."""
    batch = stack_rows(rows)
    plan = plan_passes(batch, Phase(), material.config.window, recipe.micro_batch, Draws(recipe.seed))
    tally = Tally()
    right: list[bool] = []
    per_pass = max(1, recipe.micro_batch // batch.token_ids.shape[1])
    for index, one in enumerate(plan.passes):
        output = graph.forward(one.documents, options)
        judged = judge(output, one)
        tally.count(judged, one, plan.kind_names, material.bytes_V)
        right += _answers(batch, range(index * per_pass, min((index + 1) * per_pass, len(rows))), judged.correct_T, one)
    return tally, sum(right) / max(1, len(right))


def _answers(batch: Batch, rows: range, correct_T: torch.Tensor, one: Pass) -> list[bool]:
    """Return for every answer of some rows whether all of its tokens were guessed."""
    correct = correct_T.numpy()
    found: list[bool] = []
    offset = 0
    for row in rows:
        for answer in batch.answers[row]:
            place = offset + answer.start
            found.append(bool(correct[place : place + answer.length].all()))
        offset += sum(span.length for span in batch.spans[row])  # padding is not run
    if offset != len(one.labels):
        raise InternalError(f"{offset} tokens of rows gave {len(one.labels)} labels")
    return found
