"""What every step did, for every request: plain values, and JSON lines of them."""

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.core.errors import UserError
from headrace.memory.row_counts import RowReads


@dataclass
class RowCounts:
    """What was computed, read and written for some rows.

    Attributes:
        layer_rows: complete layers times rows; producer_rows: rows on which only the decoder's KV producer ran.
        index_scored: index scores of visible entries; index_skipped: visible entries that no index had to score.
        global_bytes, index_bytes, window_bytes, ngram_bytes: read from global entries, index keys, window rows and
            n-gram tables; *_written: stored.
        reencoded_rows: cached tokens that were encoded again for their windows.
    """

    layer_rows: int = 0
    producer_rows: int = 0
    index_scored: int = 0
    index_skipped: int = 0
    index_scored_by_layer: dict[int, int] = field(default_factory=dict)
    global_bytes: int = 0
    index_bytes: int = 0
    window_bytes: int = 0
    ngram_bytes: int = 0
    global_bytes_written: int = 0
    window_bytes_written: int = 0
    reencoded_rows: int = 0

    def add(self, other: "RowCounts") -> None:
        """Add another's counts."""
        for name, value in vars(other).items():
            if name == "index_scored_by_layer":
                for layer_id, count in value.items():
                    self.index_scored_by_layer[layer_id] = self.index_scored_by_layer.get(layer_id, 0) + count
            else:
                setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, kw_only=True)
class RequestStep:
    """One request in one step.

    Attributes:
        request_id: the request; `kind`: "prefill" or "decode".
        start, stop: positions that ran through the encoder; `decoder_rows` of them, the last, through the decoder.
        replayed_rows: rows of a bounded decoder replay in this step.
        cached_tokens: tokens taken from the cache, in the request's first step; `cached_blocks` by tier likewise.
        cache_reason: why not more, in the request's first step.
        counts: what it took.
        drafts_proposed, drafts_accepted: guesses that were verified, and those that stayed.
        drafts_made: guesses that there were, of which the scheduler had the first `drafts_proposed` verified.
        draft_ids, draft_chances: those verified, and the chance that each and all before it stay.
    """

    request_id: str
    kind: str
    start: int
    stop: int
    decoder_rows: int
    replayed_rows: int
    counts: RowCounts
    cached_tokens: int = 0
    cached_blocks: dict[str, int] = field(default_factory=dict)
    cache_reason: str | None = None
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafts_made: int = 0
    draft_ids: tuple[int, ...] = ()
    draft_chances: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step: when it began (seconds since the engine's start), how long it took, rows, requests, and the queue.

    `waiting` names every request without rows and why; `preempted`, `returned` and `ended` who was swapped out, came
    back or ended (with its reason) at its beginning; `free_blocks` and `cached_blocks` are those of the pool after it.
    `ngram` is what reading n-gram rows took since the step before, by layer. `draft_gain` is tokens per second with
    drafts over those without, at the step's size of batch; None while it was not measured both ways.
    """

    step: int
    began_s: float
    seconds: float
    rows: int
    requests: tuple[RequestStep, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    preempted: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    free_blocks: int = 0
    cached_blocks: int = 0
    ngram: dict[int, RowReads] = field(default_factory=dict)
    draft_gain: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON can hold it, without copies of what it is made of."""
        requests = [{**vars(one), "counts": vars(one.counts)} for one in self.requests]
        return {
            **vars(self),
            "requests": requests,
            "ngram": {layer: vars(reads) for layer, reads in self.ngram.items()},
        }


class TraceLog:
    """Keeps the newest traces, and writes all of them to a file if asked. Owns that file."""

    def __init__(self, keep: int, file: str | None) -> None:
        """Begin.

        Raises:
            UserError: the file cannot be written.
        """
        self._kept: deque[StepTrace] = deque(maxlen=keep)
        self._file: IO[str] | None = None
        if file is not None:
            try:
                self._file = Path(file).open("a", encoding="utf-8")  # noqa: SIM115 (kept open until `close`)
            except OSError as problem:
                raise UserError(f"cannot write {file}: {problem.strerror or problem}.", param="trace_file") from None

    @property
    def is_on(self) -> bool:
        """Whether anybody wants traces."""
        return bool(self._kept.maxlen) or self._file is not None

    def add(self, trace: StepTrace) -> None:
        """Keep and write one."""
        self._kept.append(trace)
        if self._file is not None:
            try:
                self._file.write(json.dumps(trace.to_json()) + "\n")
                self._file.flush()
            except OSError:
                self._file = None  # a full disk ends the log, never an answer

    def newest(self) -> list[StepTrace]:
        """Return the kept traces, oldest first."""
        return list(self._kept)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
