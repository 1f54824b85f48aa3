"""What an engine did since it started, added up: counters for those who watch it."""

from collections import Counter
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.core.trace import RequestStep, RowCounts
from headrace.memory.row_counts import NgramReads

if TYPE_CHECKING:
    from headrace.engine.core.sequence import Sequence
    from headrace.engine.scheduler.plan import StepPlan

ROW_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class Totals:
    """Sums over all steps; none ever falls.

    Attributes:
        steps, step_seconds: steps with rows, and how long they took.
        rows: their rows, by the smallest of `ROW_BOUNDS` that holds a step's (None above all): steps.
        row_sum: their rows, all together.
        encoder_rows, decoder_rows: rows that ran through either half.
        prompt_tokens: tokens of prompts that were read, those found in the cache included.
        queried_tokens, cached_tokens: tokens of prompts that were looked up in the cache, and found; by tier.
        cached_blocks: blocks found, by tier.
        cut_short: started requests that found less than their whole prompt, by the reason's first words.
        approximate: requests that started from windows rebuilt by replay.
        generated_tokens: sampled tokens.
        replayed_rows: rows of bounded decoder replays.
        counts: everything the trace counts.
        ngram: what reading n-gram rows took, by layer.
        drafts, drafted_tokens, accepted_tokens: rounds with drafts, their tokens, and those taken; by position.
        verify_lengths: decode rows by how many guesses were verified behind them, 0 included.
        preemptions, returns: requests swapped out, and brought back.
        failed: requests that failed for a number that is none or a damaged row.
    """

    steps: int = 0
    step_seconds: float = 0.0
    rows: Counter[int | None] = field(default_factory=Counter)
    row_sum: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: Counter[str] = field(default_factory=Counter)
    cached_blocks: Counter[str] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    approximate: int = 0
    generated_tokens: int = 0
    replayed_rows: int = 0
    counts: RowCounts = field(default_factory=RowCounts)
    ngram: NgramReads = field(default_factory=NgramReads)
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: Counter[int] = field(default_factory=Counter)
    verify_lengths: Counter[int] = field(default_factory=Counter)
    preemptions: int = 0
    returns: int = 0
    failed: int = 0

    def add(self, other: "Totals") -> None:
        """Add another engine's, such as the one before a restart."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, Counter):
                mine.update(value)
            elif isinstance(value, RowCounts | NgramReads):
                mine.add(value)
            else:
                setattr(self, name, mine + value)

    def add_plan(self, plan: "StepPlan") -> None:
        """Add who moved in and out of host memory."""
        self.preemptions += len(plan.preemptions)
        self.returns += len(plan.swap_ins)

    def add_rows(self, sequences: "Several[Sequence]", steps: Several[RequestStep]) -> None:
        """Add the rows of one forward pass, before its sequences are told that their first step is over."""
        for sequence, step in zip(sequences, steps, strict=True):
            if sequence.is_first_step:
                self._add_start(sequence, step)
            count = step.stop - step.start
            self.encoder_rows += count
            self.decoder_rows += step.decoder_rows
            self.replayed_rows += step.replayed_rows
            self.counts.add(step.counts)
            if step.kind == "decode":
                self.verify_lengths[step.drafts_proposed] += 1
            else:
                self.prompt_tokens += count - step.counts.reencoded_rows
        total = sum(step.stop - step.start for step in steps)
        self.row_sum += total
        self.rows[next((bound for bound in ROW_BOUNDS if total <= bound), None)] += 1

    @property
    def mean_accepted(self) -> float | None:
        """Guesses that stayed a round with guesses; None without any."""
        return self.accepted_tokens / self.drafts if self.drafts else None

    def add_drafts(self, proposed: int, accepted: int) -> None:
        """Add one round of one sequence."""
        self.drafts += 1
        self.drafted_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_by_position.update(range(accepted))

    def add_time(self, seconds: float) -> None:
        """Add a step that had rows, when it is over."""
        self.steps += 1
        self.step_seconds += seconds

    def _add_start(self, sequence: "Sequence", step: RequestStep) -> None:
        self.prompt_tokens += step.cached_tokens
        self.approximate += sequence.is_approximate
        if sequence.mode == "replay":  # in full mode the cache is not asked
            self.queried_tokens += sequence.num_prompt
            self.cached_tokens.update(sequence.cached_by_tier)
            self.cached_blocks.update(step.cached_blocks)
        if step.cache_reason is not None:
            self.cut_short[step.cache_reason.rstrip("0123456789 ")] += 1
