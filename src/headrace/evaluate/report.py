"""The whole report on one checkpoint, and its form as JSON."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.evaluate.bits_per_byte import TextReport, choose_pieces, judge_text
from headrace.evaluate.drafting import DraftReport, judge_drafting
from headrace.evaluate.estimate import Comparison, Control
from headrace.evaluate.held_out import HeldOut, read_held_out
from headrace.evaluate.ngram_memory import NgramReport, judge_ngrams
from headrace.evaluate.pool import PoolReport, judge_pool
from headrace.evaluate.prompts import usable_lengths
from headrace.evaluate.retrieval import RetrievalReport, judge_retrieval
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import Subject, load_subject

Progress = Callable[[str], object]


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that was found.

    A part is None where the model has no such mechanism; `drafting` and `pool` too where text or lengths are too short.
    """

    subject: Subject
    held_out: HeldOut
    settings: Settings
    lengths: tuple[int, ...]
    text: TextReport
    ngrams: NgramReport | None
    retrieval: RetrievalReport
    pool: PoolReport | None
    drafting: DraftReport | None
    cpu_seconds: dict[str, float]

    @property
    def comparisons(self) -> list[Comparison]:
        """All paired differences."""
        parts = (self.text, self.ngrams, self.retrieval, self.pool, self.drafting)
        return [one for part in parts if part is not None for one in part.comparisons]

    @property
    def controls(self) -> list[Control]:
        """All arms that had to fail."""
        parts = (self.text, self.ngrams, self.pool, self.drafting)
        found = [one for part in parts if part is not None for one in part.controls]
        return [*found, self.retrieval.window_only.control]


@dataclass
class _Clock:
    """Adds up the CPU seconds of each part."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name] = round(time.process_time() - started, 2)


def judge(path: Path, text: Path, settings: Settings, progress: Progress) -> Report:
    """Judge a checkpoint.

    Args:
        path: a checkpoint folder with a tokenizer of headrace's own training.
        text: held-out text, see `held_out.py`.
        settings: how much to judge.
        progress: told what is being done.

    Raises:
        UserError: checkpoint or text is refused, or nothing of it fits together.

    State: none; the same inputs give the same figures.
    """
    clock = _Clock()
    with clock.part("load"):
        subject = load_subject(path)
        held_out = read_held_out(text, subject.encoder)
        lengths = usable_lengths(subject.config, settings)
        pieces = choose_pieces(held_out, settings, subject.config.window)
    with clock.part("drafting"):
        drafting = judge_drafting(subject, held_out, settings, progress)
    with clock.part("bits_per_byte"):
        progress(f"bits per byte: {len(pieces)} pieces of held-out text")
        bits = judge_text(subject, pieces)
    with clock.part("ngrams"):
        progress("n-gram memory: zeroed and scrambled")
        ngrams = judge_ngrams(subject, pieces, bits.whole["fp4"], settings.seed)
    with clock.part("pool"):
        pool = judge_pool(subject, held_out, settings, progress)
    with clock.part("retrieval"):
        retrieval = judge_retrieval(subject, held_out, settings, progress)
    return Report(subject, held_out, settings, lengths, bits, ngrams, retrieval, pool, drafting, clock.seconds)


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as a document of plain values; null where nothing can be said."""
    retrieval, text = report.retrieval, report.text
    return {
        "model": str(report.subject.path),
        "numerics": report.subject.model.numerics.name,
        "held_out": {
            "file": str(report.held_out.path),
            "licences": list(report.held_out.licences),
            "documents": len(report.held_out.text),
            "bytes": report.held_out.text.num_bytes,
        },
        "settings": asdict(report.settings),
        "lengths": list(report.lengths),
        "bpb": _bits(text),
        "engram": None if report.ngrams is None else {name: one.value for name, one in report.ngrams.arms.items()},
        "retrieval": [asdict(cell) for cell in retrieval.cells],
        "retrieval_overall": [asdict(cell) for cell in retrieval.overall],
        "control": _window_only(retrieval),
        **_pool(report.pool),
        **_drafting(report.drafting),
        "comparisons": [asdict(one) for one in report.comparisons],
        "controls": [asdict(one) for one in report.controls],
        "cpu_seconds": report.cpu_seconds,
    }


def _bits(text: TextReport) -> dict[str, Any]:
    scores = text.shared["full"]["fp4"]
    return {
        **{mode: {caches: one.value for caches, one in arms.items()} for mode, arms in text.shared.items()},
        "whole_documents": {caches: one.value for caches, one in text.whole.items()},
        "tokens": text.num_tokens,
        "bytes": round(sum(scores.num_bytes)),
        "documents": len(scores.bits),
        "first_cut": text.first_cut,
    }


def _window_only(retrieval: RetrievalReport) -> dict[str, Any]:
    denied = retrieval.window_only
    return {
        "window_only": denied.overall.value,
        "stderr": denied.overall.stderr,
        "chance": denied.chance,
        "n": denied.n,
        "rows": denied.overall.clusters,
        "has_failed": denied.control.has_failed,
        "cells": [asdict(cell) for cell in denied.cells],
    }


def _pool(pool: PoolReport | None) -> dict[str, Any]:
    if pool is None:
        return {"pool_recall": None, "pool": None}
    return {
        "pool_recall": pool.recall.value,
        "pool": {
            "recall_stderr": pool.recall.stderr,
            "random_recall": pool.random_recall.value,
            "cells": [asdict(cell) for cell in pool.cells],
        },
    }


def _drafting(drafting: DraftReport | None) -> dict[str, Any]:
    if drafting is None:
        return {"accepted_per_round": None, "drafting": None}
    return {
        "accepted_per_round": drafting.accepted.value,
        "drafting": {
            "stderr": drafting.accepted.stderr,
            "accepted_per_position": drafting.per_position,
            "accepted_given_all_before": drafting.conditional,
            "rounds": drafting.rounds,
            "proposed": drafting.proposed,
            "prompts": drafting.prompts,
            "with_context_of_another_prompt": drafting.shuffled.value,
        },
    }
