"""Accuracy on questions whose clue lies far back, by length, third and mode; standard errors clustered by row.

An answer is right when every token of it is the most probable one, which is what greedy generation would write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.evaluate.estimate import Comparison, Control, Estimate, compare, must_be_at, ratio
from headrace.evaluate.held_out import HeldOut
from headrace.evaluate.prompts import PAIRS, POSITIONS, Prompt, natural_prompts, pair_prompts, usable_lengths
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import FP4_CACHES, PLAIN_CACHES, Subject
from headrace.evaluate.trial import Judged, Mode, judge_trials
from headrace.train.data.tasks.puzzles import PUZZLES
from headrace.train.graph import GraphOptions, TrainGraph

MODES: tuple[Mode, ...] = ("full", "replay")


@dataclass(frozen=True)
class Cell:
    """Accuracy of one task, length, position and mode: `n` answers in `rows` rows.

    Clues lie `nearest` tokens or more before their questions.
    """

    task: str
    tokens: int
    position: str
    mode: str
    accuracy: float | None
    stderr: float | None
    n: int
    rows: int
    nearest: int
    mean_distance: float


@dataclass(frozen=True, eq=False)
class WindowOnly:
    """The control: the same rows with global entries at zero. `cells` have the position "all"."""

    overall: Estimate
    chance: float
    n: int
    cells: list[Cell]
    control: Control


@dataclass(frozen=True, eq=False)
class RetrievalReport:
    """What `judge_retrieval` found; `overall` are the cells with all positions together."""

    cells: list[Cell]
    overall: list[Cell]
    comparisons: list[Comparison]
    window_only: WindowOnly


@dataclass(frozen=True, eq=False)
class Answered:
    """Prompts of one task and length with their results."""

    prompts: Sequence[Prompt]
    judged: Sequence[dict[Mode, Judged]]

    def rights(self, mode: Mode, position: str) -> tuple[list[float], list[float]]:
        """Return right answers and answers of every row; position "all" takes all of them."""
        right, asked = [], []
        for prompt, found in zip(self.prompts, self.judged, strict=True):
            chosen = [one for one in prompt.questions if position in (one.position, "all")]
            results = [bool(found[mode].within(one.first, one.stop).is_right.all()) for one in chosen]
            right.append(float(sum(results)))
            asked.append(float(len(results)))
        return right, asked

    def cell(self, mode: Mode, position: str) -> Cell:
        """Return the accuracy of a mode and a position."""
        right, asked = self.rights(mode, position)
        found = ratio(right, asked)
        distances = [
            one.distance for prompt in self.prompts for one in prompt.questions if position in (one.position, "all")
        ]
        return Cell(
            task=self.prompts[0].task,
            tokens=self.prompts[0].tokens,
            position=position,
            mode=mode,
            accuracy=found.value,
            stderr=found.stderr,
            n=int(sum(asked)),
            rows=found.clusters,
            nearest=min(distances, default=0),
            mean_distance=sum(distances) / max(1, len(distances)),
        )


def judge_retrieval(
    subject: Subject, held_out: HeldOut, settings: Settings, progress: Callable[[str], object]
) -> RetrievalReport:
    """Judge all tasks at all lengths as served, and the pairs with unrounded caches and with denied ones.

    Raises:
        UserError: no length fits the context, or the tokenizer has too few reserved tokens.
    """
    groups: list[Answered] = []
    comparisons: list[Comparison] = []
    denied: list[Answered] = []
    lengths = usable_lengths(subject.config, settings)
    for length in lengths:
        progress(f"retrieval: pairs, {length} tokens")
        count = settings.pair_rows(length)
        prompts = pair_prompts(subject.config, subject.encoder, held_out, settings, length, count)
        served = _answer(subject.graph(), subject.options(FP4_CACHES), prompts)
        plain = _answer(subject.graph(), subject.options(PLAIN_CACHES), prompts)
        groups.append(served)
        denied.append(_answer(subject.window_only(), subject.options(FP4_CACHES), prompts))
        for mode in MODES:
            comparisons.append(_between(served, plain, mode, "fp4 minus plain"))
            comparisons.append(_between(denied[-1], served, mode, "window only minus all caches"))
        for puzzle in PUZZLES:
            progress(f"retrieval: {puzzle}, {length} tokens")
            count = settings.natural_rows(length)
            natural = natural_prompts(subject.config, subject.encoder, puzzle, settings, length, count)
            if not natural:
                continue
            groups.append(_answer(subject.graph(), subject.options(FP4_CACHES), natural))
            if length == lengths[0]:
                denied.append(_answer(subject.window_only(), subject.options(FP4_CACHES), natural))
    cells = [one.cell(mode, position) for one in groups for position in POSITIONS for mode in MODES]
    return RetrievalReport(
        cells=[cell for cell in cells if cell.n],
        overall=[one.cell(mode, "all") for one in groups for mode in MODES],
        comparisons=[_between_modes(one) for one in groups] + comparisons,
        window_only=_window_only(denied, settings),
    )


def _answer(graph: TrainGraph, options: GraphOptions, prompts: Sequence[Prompt]) -> Answered:
    return Answered(prompts, judge_trials(graph, options, [prompt.trial for prompt in prompts], MODES))


def _between_modes(one: Answered) -> Comparison:
    (replay, asked), (full, _) = one.rights("replay", "all"), one.rights("full", "all")
    name = f"retrieval.{one.prompts[0].task}.{one.prompts[0].tokens}: replay minus full"
    return compare(name, "accuracy", replay, full, asked)


def _between(one: Answered, other: Answered, mode: Mode, arms: str) -> Comparison:
    (first, asked), (second, _) = one.rights(mode, "all"), other.rights(mode, "all")
    name = f"retrieval.{one.prompts[0].task}.{one.prompts[0].tokens}.{mode}: {arms}"
    return compare(name, "accuracy", first, second, asked)


def _window_only(denied: Sequence[Answered], settings: Settings) -> WindowOnly:
    chance = 1.0 / min(settings.num_pairs, settings.num_values)
    right: list[float] = []
    asked: list[float] = []
    for one in denied:
        if one.prompts[0].task == PAIRS:
            found = one.rights("full", "all")
            right += found[0]
            asked += found[1]
    overall = ratio(right, asked)
    return WindowOnly(
        overall=overall,
        chance=chance,
        n=int(sum(asked)),
        cells=[one.cell(mode, "all") for one in denied for mode in MODES],
        control=must_be_at("retrieval.pairs: window only", chance, overall),
    )
