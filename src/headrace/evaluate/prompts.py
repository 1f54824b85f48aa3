"""Rows that can only be answered through far context: fused pairs in held-out text, and their natural forms.

Every clue lies more than a window before its question. A row of pairs asks about clues everywhere in it; the clues of
a natural prompt lie in one third of it, and prompts take turns with the thirds.
"""

from dataclasses import dataclass

import numpy as np

from headrace.core.errors import UserError
from headrace.evaluate.held_out import HeldOut
from headrace.evaluate.settings import NATURAL_POSITIONS, Settings
from headrace.evaluate.trial import Trial
from headrace.models.deepseek_v41.config import Config
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary
from headrace.train.data.tasks.puzzles import PUZZLES
from headrace.train.data.tasks.retrieval import RetrievalTask
from headrace.train.passes import labelled_runs

PAIRS = "pairs"
QUESTIONS = {"config_value": 4, "definition": 4}
"""Questions of a natural prompt, one turn each, where it has more than one; as in the recipe of the shipped model."""
POSITIONS = ("early", "middle", "late")


@dataclass(frozen=True)
class Question:
    """Rows `first` to `stop` - 1 give the answer; the clue ends `distance` tokens before the first of them."""

    first: int
    stop: int
    distance: int
    position: str


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row with its questions; `tokens` is its nominal length."""

    task: str
    tokens: int
    trial: Trial
    questions: tuple[Question, ...]


def least_distance(config: Config) -> int:
    """Return the fewest tokens from a clue to a question: one more than any window shows."""
    return config.window + 1


def usable_lengths(config: Config, settings: Settings) -> tuple[int, ...]:
    """Return the lengths that the context holds and in which pairs fit a third each.

    Raises:
        UserError: there is none.
    """
    least = settings.num_queries + least_distance(config) + 3 * settings.num_pairs
    lengths = tuple(length for length in settings.lengths if least <= length <= config.max_positions)
    if not lengths:
        raise UserError(
            f"rows of pairs need {least} tokens or more; the context of {config.max_positions} tokens holds none of "
            f"the lengths {', '.join(map(str, settings.lengths))}.",
            param="path",
        )
    return lengths


def pair_prompts(
    config: Config, encoder: Encoder, held_out: HeldOut, settings: Settings, length: int, count: int
) -> list[Prompt]:
    """Return rows of fused pairs of a length.

    Raises:
        UserError: the tokenizer has too few reserved tokens.
    """
    task = PairTask(
        vocabulary=_pair_vocabulary(encoder, held_out, settings),
        num_pairs=settings.num_pairs,
        num_queries=settings.num_queries,
        min_distance=least_distance(config),
        num_tokens=length,
    )
    num_places = length - settings.num_queries - task.min_distance + 1
    prompts = []
    for row in range(count):
        sample = task.make(Draws(settings.seed, "evaluate", PAIRS, length, row), length)
        if sample is not None:
            thirds = [3 * (one.start - (one.distance or 0)) // num_places for one in sample.answers]
            prompts.append(_prompt(PAIRS, length, sample, [POSITIONS[third] for third in thirds]))
    return prompts


def _pair_vocabulary(encoder: Encoder, held_out: HeldOut, settings: Settings) -> PairVocabulary:
    """Return the probe in the reserved ids of a trained vocabulary, with held-out text around the pairs."""
    first, needed = special_tokens.FIRST_RESERVED_ID, settings.num_pair_ids
    if encoder.token_id(special_tokens.reserved_token(needed - 1)) != first + needed - 1:
        raise UserError(
            f"the pair probe needs {needed} reserved ids in a row from {first} on; a tokenizer of headrace's own "
            "training is accepted.",
            param="tokenizer",
        )
    return PairVocabulary(
        num_keys=settings.num_keys,
        num_values=settings.num_values,
        first_pair_id=first,
        noise_ids=held_out.text.token_ids.astype(np.int64),
        is_noise_text=True,
    )


def natural_prompts(
    config: Config, encoder: Encoder, puzzle: str, settings: Settings, length: int, count: int
) -> list[Prompt]:
    """Return prompts of one natural form, at most `length` tokens each; fewer where the form does not fit."""
    prompts = []
    for row in range(count):
        third = row % NATURAL_POSITIONS
        task = RetrievalTask(
            encoder=encoder,
            name=puzzle,
            puzzle=PUZZLES[puzzle],
            num_questions=QUESTIONS.get(puzzle, 1),
            depth=(third / 3, (third + 1) / 3),
            min_distance=least_distance(config),
            num_tokens=length,
        )
        sample = task.make(Draws(settings.seed, "evaluate", puzzle, length, row), length)
        if sample is not None:
            prompts.append(_prompt(puzzle, length, sample, [POSITIONS[third]] * len(sample.answers)))
    return prompts


def _prompt(task: str, tokens: int, sample: Sample, positions: list[str]) -> Prompt:
    questions = tuple(
        Question(answer.start, answer.start + answer.length, answer.distance or 0, position)
        for answer, position in zip(sample.answers, positions, strict=True)
    )
    trial = Trial(sample.token_ids, sample.labels, tuple(labelled_runs(sample.labels)))
    return Prompt(task, tokens, trial, questions)
