"""Bits per byte of held-out text: both modes, rounded and unrounded caches, on the same tokens.

Documents are cut into pieces; in every piece a prompt ends each two windows, and the two windows behind it are judged.
What replay costs lies right behind a cut, so the first tokens there are compared by themselves too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.evaluate.estimate import Comparison, Control, compare, must_differ, ratio
from headrace.evaluate.held_out import HeldOut
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import FP4_CACHES, PLAIN_CACHES, Subject
from headrace.evaluate.trial import Mode, Trial, judge_trials
from headrace.train.data.packing import Ids, next_token_labels
from headrace.train.data.tokenizer import token_bytes
from headrace.train.graph import GraphOptions, TrainGraph

_CUT_WINDOWS = 2  # windows from one cut to the next
_LEAST_JUDGED = 16  # a piece has to have so many tokens behind its first cut
NEAR = 16  # tokens right behind a cut
_UNIT = "bits per byte"


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a held-out document; pieces of one document are one cluster."""

    document: int
    trial: Trial


@dataclass(frozen=True, eq=False)
class Scores:
    """Sums per document: bits, and the bytes of the tokens they were paid for."""

    bits: list[float]
    num_bytes: list[float]

    @property
    def value(self) -> float | None:
        """Bits per byte over all documents."""
        return ratio(self.bits, self.num_bytes).value


@dataclass(frozen=True, eq=False)
class TextReport:
    """What `judge_text` found.

    Attributes:
        shared: scores by mode and caches ("fp4", "plain"), all on the tokens behind the first cut of their piece.
        whole: scores of all tokens in full mode, by caches.
        comparisons, controls: paired over documents.
        num_tokens: tokens behind first cuts.
        first_cut: tokens of the shortest prompt, and from cut to cut.
    """

    shared: dict[Mode, dict[str, Scores]]
    whole: dict[str, Scores]
    comparisons: list[Comparison]
    controls: list[Control]
    num_tokens: int
    first_cut: int


def choose_pieces(held_out: HeldOut, settings: Settings, window: int) -> list[Piece]:
    """Return pieces up to the wanted number of tokens: the first of every document, then the second, and so on.

    Raises:
        UserError: no document is long enough to be cut once.
    """
    first = _CUT_WINDOWS * window
    chosen, left = [], settings.text_tokens
    longest = max(held_out.text.length(document) for document in range(len(held_out.text)))
    for start in range(0, longest, settings.piece_tokens):
        for document in range(len(held_out.text)):
            ids = held_out.ids(document)[start : start + settings.piece_tokens][: max(0, left)]
            if len(ids) >= first + _LEAST_JUDGED:
                chosen.append(Piece(document, _text_trial(ids, first)))
                left -= len(ids)
    if not chosen:
        raise UserError(
            f"no document of {held_out.path} has {first + _LEAST_JUDGED} tokens, the least that can be judged in "
            f"both modes; the longest has {longest}.",
            param="text",
        )
    return chosen


def _text_trial(ids: Ids, step: int) -> Trial:
    last = len(ids) - 1  # the last token has nothing to predict
    runs = tuple((first, min(first + step, last)) for first in range(step - 1, last, step))
    return Trial(ids, next_token_labels(ids), runs)


def judge_text(subject: Subject, pieces: Sequence[Piece]) -> TextReport:
    """Judge text in both modes with both kinds of caches, and the controls: nothing replayed, nothing far away."""
    scorer = TextScorer(subject, pieces)
    arms = {
        "fp4": scorer.score(subject.graph(), subject.options(FP4_CACHES), ("full", "replay", "cold")),
        "plain": scorer.score(subject.graph(), subject.options(PLAIN_CACHES), ("full", "replay")),
    }
    denied = scorer.score(subject.window_only(), subject.options(FP4_CACHES), ("full",))["full"]
    modes: tuple[Mode, ...] = ("full", "replay")
    shared = {mode: {caches: arm[mode] for caches, arm in arms.items()} for mode in modes}
    comparisons = [
        _compare(f"bpb.{caches}: replay minus full", shared["replay"][caches], shared["full"][caches])
        for caches in arms
    ]
    comparisons += [
        _compare(f"bpb.{mode}: fp4 minus plain", shared[mode]["fp4"], shared[mode]["plain"]) for mode in modes
    ]
    near = {mode: arms["fp4"][f"{mode}, near"] for mode in (*modes, "cold")}
    first = f"bpb.fp4, first {NEAR} tokens"
    comparisons.append(_compare(f"{first}: replay minus full", near["replay"], near["full"]))
    broken = [
        _compare(f"{first}: replay of one token minus replay", near["cold"], near["replay"]),
        _compare("bpb.full.fp4: window only minus all caches", denied, shared["full"]["fp4"]),
    ]
    return TextReport(
        shared=shared,
        whole={caches: arm["whole"] for caches, arm in arms.items()},
        comparisons=comparisons + broken,
        controls=[must_differ(one, "higher") for one in broken],
        num_tokens=sum(stop - first for piece in pieces for first, stop in piece.trial.runs),
        first_cut=pieces[0].trial.runs[0][0] + 1,
    )


def _compare(name: str, first: Scores, second: Scores) -> Comparison:
    return compare(name, _UNIT, first.bits, second.bits, second.num_bytes)


def _is_near(rows: Ids, runs: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Say which rows are among the first of a run."""
    starts = np.array([first for first, _ in runs])
    return rows - starts[np.searchsorted(starts, rows, side="right") - 1] < NEAR


class TextScorer:
    """Adds up bits and bytes of pieces, document by document."""

    def __init__(self, subject: Subject, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._bytes_V = token_bytes(subject.tokenizer)
        self._clusters = {document: place for place, document in enumerate(sorted({one.document for one in pieces}))}

    def score(self, graph: TrainGraph, options: GraphOptions, modes: Sequence[Mode]) -> dict[str, Scores]:
        """Return scores: by mode on the tokens behind first cuts, "MODE, near" a cut, and "whole", all in full mode."""
        judged = judge_trials(graph, options, [piece.trial for piece in self._pieces], modes)
        names = [*modes, *(f"{mode}, near" for mode in modes), "whole"]
        bits = {name: np.zeros(len(self._clusters)) for name in names}
        num_bytes = {name: np.zeros(len(self._clusters)) for name in names}
        for piece, found in zip(self._pieces, judged, strict=True):
            place, runs = self._clusters[piece.document], piece.trial.runs
            parts = {str(mode): found[mode].within(runs[0][0], runs[-1][1]) for mode in modes}
            near = {f"{mode}, near": part.chosen(_is_near(part.rows, runs)) for mode, part in parts.items()}
            for name, part in {**parts, **near, "whole": found["full"]}.items():
                bits[name][place] += part.nats.sum() / math.log(2)
                num_bytes[name][place] += self._bytes_V[piece.trial.labels[part.rows]].sum()
        return {name: Scores(bits[name].tolist(), num_bytes[name].tolist()) for name in names}
