"""What an X-ray tells, as values that cross processes: the front unpickles them, so nothing here needs torch."""

from dataclasses import dataclass, field, replace

from headrace.engine.core.trace import RequestStep

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What the attention of one row read in one layer: its own window, and selected entries of the global cache.

    `window` and each of `entries` are half-open spans of token positions; an entry covers as many tokens as its source
    compresses into one. A layer that reuses a selection reads what its index source selected. `earlier` has the same of
    the rows before in the same step, newest first, where the step verified guesses.
    """

    window: tuple[int, int]
    entries: Spans
    earlier: "tuple[Reads, ...]" = ()


@dataclass(frozen=True, kw_only=True)
class StepXray:
    """One step of one request: its number, seconds so far, what its rows took, and what the last row read.

    `reads` has the index sources only, by layer; it is empty where the last row did not reach the decoder's end.
    `draft_gain` is as in `StepTrace`.
    """

    step: int
    seconds: float
    request: RequestStep
    reads: dict[int, Reads] = field(default_factory=dict)
    draft_gain: float | None = None

    def of_row(self, back: int) -> "StepXray":
        """Return the same with what the row `back` rows before the last one read, and no other row."""
        found = {}
        for layer_id, last in self.reads.items():
            if back <= len(last.earlier):
                found[layer_id] = replace((last, *last.earlier)[back], earlier=())
        return replace(self, reads=found)
