"""Whether a step drafts, and how many guesses of each sequence it verifies: costs, confidences and what happened."""

from collections.abc import Sequence

from headrace.engine.drafting.cost_table import CostTable
from headrace.engine.drafting.guard import Guard, GuardReport
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.survival import KeptSoFar, survival
from headrace.engine.drafting.temperatures import Scale
from headrace.engine.drafting.verify_length import synchronous_lengths


class DraftPolicy:
    """Owns the guard and what was kept of earlier guesses.

    Without a cost table every guess is verified. `is_guarded` False never pauses drafting.
    """

    def __init__(
        self,
        max_guesses: int,
        *,
        table: CostTable | None = None,
        scale: Scale | None = None,
        is_guarded: bool = True,
    ) -> None:
        self._table = table
        self._scale = scale or Scale.neutral(max_guesses)
        self._history = KeptSoFar(max_guesses)
        self._guard = Guard() if is_guarded else None

    def wants(self, batch: int) -> bool:
        """Return whether a step with so many sequences in decode drafts."""
        return batch > 0 and (self._guard is None or self._guard.drafts(batch))

    def lengths(self, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many guesses of each proposal to verify."""
        if self._table is None:
            return [len(proposal) for proposal in proposals]
        chances = [survival(proposal, self._scale, self._history) for proposal in proposals]
        return synchronous_lengths(chances, self._table.step_seconds(len(proposals)))

    def note_round(self, judged: int, kept: int) -> None:
        """Take what became of one sequence's guesses."""
        if judged:
            self._history.add(judged, kept)

    def note_step(self, batch: int, *, is_drafted: bool, tokens: int, seconds: float) -> None:
        """Take what a step without prompts brought."""
        if self._guard is not None and batch:
            self._guard.add(batch, is_drafted=is_drafted, tokens=tokens, seconds=seconds)

    def report(self) -> dict[int, GuardReport]:
        """Return tokens per second with and without drafts by size of batch, as far as measured."""
        return {} if self._guard is None else self._guard.report()
