"""The report as lines for a reader."""

from collections.abc import Iterator

from headrace.evaluate.drafting import DraftReport
from headrace.evaluate.estimate import Comparison
from headrace.evaluate.pool import PoolReport
from headrace.evaluate.report import Report
from headrace.evaluate.retrieval import Cell, RetrievalReport


def lines(report: Report) -> Iterator[str]:
    """Yield the lines."""
    text = report.text
    yield f"{report.subject.path}, {report.subject.model.numerics.name}, held-out text {report.held_out.path}"
    yield ""
    yield f"bits per byte, {text.num_tokens} tokens behind cuts from {text.first_cut} tokens on"
    for mode, arms in text.shared.items():
        yield f"  {mode:7}" + "".join(f"  {caches} {_number(one.value, 4)}" for caches, one in arms.items())
    yield "  whole documents, full" + "".join(f"  {name} {_number(one.value, 4)}" for name, one in text.whole.items())
    if report.ngrams is not None:
        memory = "".join(f"  {name} {_number(one.value, 4)}" for name, one in report.ngrams.arms.items())
        yield f"  n-gram memory{memory}"
    yield ""
    yield "retrieval, accuracy by position of the clue (answers), and ± standard error over all"
    yield from _retrieval(report.retrieval)
    yield ""
    if report.pool is not None:
        yield from _pool(report.pool)
    if report.drafting is not None:
        yield from _drafting(report.drafting)
    yield "paired differences ± standard error"
    yield from map(_comparison, report.comparisons)
    yield ""
    yield "controls that must fail"
    for one in report.controls:
        verdict = {True: "failed as it must", False: "DID NOT FAIL", None: "cannot be said"}[one.has_failed]
        yield f"  {one.name}: {_number(one.value, 4)} ± {_number(one.stderr, 4)}, must be {one.must}: {verdict}"
    spent = sum(report.cpu_seconds.values())
    yield ""
    yield f"{spent:.0f} CPU seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in report.cpu_seconds.items())


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _retrieval(found: RetrievalReport) -> Iterator[str]:
    for whole in found.overall:
        same = [
            one for one in found.cells if (one.task, one.tokens, one.mode) == (whole.task, whole.tokens, whole.mode)
        ]
        places = "  ".join(f"{one.position} {_number(one.accuracy)} ({one.n})" for one in same)
        yield f"{_cell(whole)}  {places}"
    yield f"  window only, chance {_number(found.window_only.chance)}"
    yield from map(_cell, found.window_only.cells)


def _cell(cell: Cell) -> str:
    return (
        f"  {cell.task:13}{cell.tokens:6} {cell.mode:7}{_number(cell.accuracy)} ± {_number(cell.stderr)} ({cell.n}), "
        f"clues from {cell.nearest} tokens on"
    )


def _pool(pool: PoolReport) -> Iterator[str]:
    yield f"candidate pool, recall {_number(pool.recall.value)}, random blocks {_number(pool.random_recall.value)}"
    for cell in pool.cells:
        yield (
            f"  layer {cell.layer} {cell.kind:6} {cell.tokens:6}: recall {_number(cell.recall)}, attention mass "
            f"{_number(cell.mass)}, picked {_number(cell.picked_mass)}; the pool is {cell.share:.0%} of the entries"
        )
    yield ""


def _drafting(drafting: DraftReport) -> Iterator[str]:
    places = " ".join(f"{share:.2f}" for share in drafting.per_position)
    yield (
        f"drafting, {_number(drafting.accepted.value)} ± {_number(drafting.accepted.stderr)} accepted a round "
        f"({drafting.rounds} rounds, {drafting.proposed} proposed), by place {places}"
    )
    yield ""


def _comparison(one: Comparison) -> str:
    relative = "" if one.relative is None else f" ({one.relative:+.2%})"
    return f"  {one.name}: {_number(one.difference, 4)} ± {_number(one.stderr, 4)} {one.unit}{relative}"
