"""What the n-gram memory (Engram) is worth: held-out text with it, without it, and with the rows of other tokens.

Zeroed, the gate's output is 0. Scrambled, every token makes the same lookups at the addresses of another token, so
that parameters and compute stay and the information goes; it must cost at least what the memory gains.
Source: training.md section 11.4, E4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.evaluate.bits_per_byte import Piece, Scores, TextScorer
from headrace.evaluate.estimate import Comparison, Control, compare, must_differ
from headrace.evaluate.subject import Subject


@dataclass(frozen=True, eq=False)
class NgramReport:
    """Bits per byte of whole documents in full mode, by arm: "normal", "zeroed", "scrambled"."""

    arms: dict[str, Scores]
    comparisons: list[Comparison]
    controls: list[Control]


def judge_ngrams(subject: Subject, pieces: Sequence[Piece], normal: Scores, seed: int) -> NgramReport | None:
    """Judge the two broken arms against `normal`, the scores of the same pieces; None without n-gram memory."""
    if subject.config.engram is None:
        return None
    scorer = TextScorer(subject, pieces)
    graphs = {"zeroed": subject.without_ngrams(), "scrambled": subject.with_scrambled_ngrams(seed)}
    arms = {"normal": normal}
    for name, graph in graphs.items():
        arms[name] = scorer.score(graph, subject.options(), ("full",))["whole"]
    comparisons = [
        compare(f"engram: {name} minus normal", "bits per byte", arms[name].bits, normal.bits, normal.num_bytes)
        for name in graphs
    ]
    return NgramReport(arms, comparisons, [must_differ(one, "higher") for one in comparisons])
