"""Judges a draft on held-out documents, and collects what calibration is fitted on.

On the corpus: losses, and the chance of each draft to be accepted. On the backbone's own greedy continuations: what is
accepted, position by position and round by round, exactly as greedy decoding would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.errors import UserError
from headrace.train.anchors import Anchors, anchors_at, draw_anchors, eligible
from headrace.train.calibration import Calibration, rounds
from headrace.train.continuations import Target, continue_samples, cut_prompt, samples_of
from headrace.train.data.draws import Draws
from headrace.train.data.packing import PackedRow, Sample, stack_rows
from headrace.train.draft_recipe import DraftRecipe
from headrace.train.dspark import DraftTrainer
from headrace.train.evaluate import task_rows
from headrace.train.graph import Document, GraphOptions
from headrace.train.mixture import Material
from headrace.train.recipe import Recipe

_ANCHORS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows of documents that no step trains on, and greedy continuations of those that have room for a draft.

    `prompts` are the prompt lengths of the `continued` documents.
    """

    rows: tuple[tuple[Sample, ...], ...]
    continued: tuple[Sample, ...]
    prompts: tuple[int, ...]


def held_out_rows(material: Material, data: Recipe, recipe: DraftRecipe) -> tuple[list[PackedRow], list[PackedRow]]:
    """Return the rows to judge by and the rows to calibrate on; they share none.

    Where there is less held-out text than both ask for, each gets its share.

    Raises:
        UserError: one of them asks for rows and gets none.
    """
    judged, fitted = recipe.evaluation, recipe.calibration
    wanted = max(1, judged.text_rows + fitted.text_rows)
    cut = min(judged.text_rows, len(material.held_out) * judged.text_rows // wanted)
    first, second = list(material.held_out[:cut]), list(material.held_out[cut:])
    for task in material.tasks:
        rows = task_rows(task, data, recipe.row_tokens, material.config.pad_token_id)
        first += rows[: judged.task_rows]
        second += rows[judged.task_rows :]
    for what, rows, settings in (("evaluation", first, judged), ("calibration", second, fitted)):
        if not rows and settings.text_rows + settings.task_rows:
            raise UserError(
                f"the {what} of the recipe asks for {settings.text_rows} rows of text and {settings.task_rows} of each "
                "task, and there are none; more held-out text, tasks, or 0 of both is accepted.",
                param=what,
            )
    return first, second


def continue_rows(target: Target, rows: Sequence[PackedRow], recipe: DraftRecipe, what: str) -> HeldOut:
    """Let the backbone continue the documents of held-out rows."""
    if not rows:
        return HeldOut((), (), ())
    block = recipe.draft.block_size
    samples = [tuple(row) for row in samples_of(stack_rows(rows))]
    flat = [sample for row in samples for sample in row]
    draws = [Draws(recipe.seed, "held-out prompt", what, place) for place in range(len(flat))]
    cuts = [cut_prompt(sample, block, one) for sample, one in zip(flat, draws, strict=True)]
    chosen = [place for place, cut in enumerate(cuts) if cut is not None]
    prompts = [cut for cut in cuts if cut is not None]
    continued = continue_samples(
        target,
        [flat[place] for place in chosen],
        prompts,
        [draws[place] for place in chosen],
        tokens=recipe.continuations.tokens,
        temperature=0.0,
    )
    return HeldOut(tuple(samples), tuple(continued), tuple(prompts))


@torch.no_grad()
def corpus_figures(
    trainer: DraftTrainer, options: GraphOptions, rows: Sequence[Sequence[Sample]], recipe: DraftRecipe
) -> dict[str, float]:
    """Return the losses on the corpus, `acceptance.K` of draft K, and `expected_accepted` drafts of a round.

    `expected_accepted` is the mean over anchors of the sum over K of the product of the first K acceptances.
    """
    block = recipe.draft.block_size
    sums = np.zeros(4)
    accepted, counts, expected, num_anchors = np.zeros(block), np.zeros(block), 0.0, 0
    for number, low in enumerate(range(0, len(rows), recipe.micro_rows)):
        part = rows[low : low + recipe.micro_rows]
        samples = [sample for row in part for sample in row]
        draws = Draws(recipe.seed, "held-out anchors", number)
        anchors = draw_anchors(samples, recipe.anchors_per_row * len(part), block, draws)
        if not anchors:
            continue
        loss = trainer.loss(_documents(samples), anchors, options, 1.0)
        weight = float(trainer.position_weights(anchors).sum())
        sums += [loss.cross_entropy, loss.variation, loss.confidence, weight]
        valid = np.concatenate([one.valid for one in anchors])
        acceptance = loss.acceptance_AX.double().numpy() * valid
        accepted, counts = accepted + acceptance.sum(0), counts + valid.sum(0)
        expected += float(np.cumprod(acceptance, axis=1).sum())
        num_anchors += len(valid)
    if not num_anchors:
        return {}
    parts = dict(zip(("cross_entropy", "variation", "confidence"), (sums[:3] / sums[3]).tolist(), strict=True))
    weights = recipe.losses
    total = sum(getattr(weights, name) * value for name, value in parts.items())
    figures = {"held_out_loss": total, **{f"held_out_{name}": value for name, value in parts.items()}}
    shares = accepted / np.maximum(1, counts)
    figures |= {f"acceptance.{place + 1}": float(value) for place, value in enumerate(shares)}
    return {**figures, "expected_accepted": expected / num_anchors}


@torch.no_grad()
def collect(trainer: DraftTrainer, options: GraphOptions, held: HeldOut, block_size: int) -> Calibration | None:
    """Draft at every position of the continued documents; None where no document has room."""
    parts: list[Calibration] = []
    for places, anchors in _groups(held, block_size):
        samples = [held.continued[place] for place in places]
        run = trainer.run(_documents(samples), anchors, options)
        drafts, judged = trainer.propose(run), trainer.judge(run, anchors)
        is_right = drafts.ids_AX == run.known_AK[:, 1:]
        accepted = is_right.to(torch.uint8).cummin(1).values
        owners = np.concatenate([np.full(len(one.positions), places[one.document]) for one in anchors])
        walked = [rounds(accepted[torch.from_numpy(owners == place)].numpy()) for place in places]
        parts.append(
            Calibration(
                confidence=drafts.confidence_AX.float(),
                accepted=accepted,
                acceptance=judged.acceptance_AX.float(),
                document=torch.from_numpy(owners).long(),
                position=torch.from_numpy(np.concatenate([one.positions for one in anchors])),
                is_round=torch.from_numpy(np.concatenate(walked)).to(torch.uint8),
            )
        )
    return Calibration.joined(parts) if parts else None


def greedy_figures(data: Calibration | None, kinds: Sequence[str]) -> dict[str, float]:
    """Return `accepted_per_round` drafts, overall and per kind of document, and `accepted.K`, the share of rounds.

    Args:
        data: of continued documents.
        kinds: kind of each document.
    """
    if data is None:
        return {}
    is_round = data.is_round.bool()
    accepted, documents = data.accepted[is_round].double(), data.document[is_round]
    figures = {"accepted_per_round": float(accepted.sum(1).mean())}
    for kind in sorted(set(kinds)):
        of_kind = torch.tensor([kinds[document] == kind for document in documents.tolist()])
        if of_kind.any():
            figures[f"accepted_per_round.{kind}"] = float(accepted[of_kind].sum(1).mean())
    return figures | {f"accepted.{place + 1}": float(value) for place, value in enumerate(accepted.mean(0))}


def _groups(held: HeldOut, block_size: int) -> Iterator[tuple[list[int], list[Anchors]]]:
    """Yield documents to run at once and their anchors: every position from the prompt's last token on."""
    places: list[int] = []
    anchors: list[Anchors] = []
    filled = 0
    for place, (sample, prompt) in enumerate(zip(held.continued, held.prompts, strict=True)):
        found = eligible(sample, block_size)
        found = found[found >= prompt - 1]
        if not len(found):
            continue
        if places and filled + len(found) > _ANCHORS_AT_ONCE:
            yield places, anchors
            places, anchors, filled = [], [], 0
        anchors = [*anchors, anchors_at(len(places), sample, found, block_size)]
        places = [*places, place]
        filled += len(found)
    if places:
        yield places, anchors


def _documents(samples: Sequence[Sample]) -> list[Document]:
    return [Document(sample.token_ids) for sample in samples]
