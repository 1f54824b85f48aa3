"""Whether a step drafts, and how many guesses of each sequence it verifies: costs, confidences and what happened."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from headrace.engine.drafting.cost_table import CostTable
from headrace.engine.drafting.guard import Guard, GuardReport
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.survival import KeptSoFar, survival
from headrace.engine.drafting.temperatures import Scale
from headrace.engine.drafting.verify_length import is_drafting_worth, synchronous_lengths
from headrace.engine.drafting.watch import CalibrationWatch

_UNKNOWN_PRICE = 2.0  # plain steps, of a step that drafts on a machine that nothing is known of


class DraftPolicy:
    """Owns the guard, what was kept of earlier guesses, and how honest their chances were.

    The cost table says what a step that drafts takes until some were measured, and how many guesses are verified;
    without one all are. `is_guarded` False always drafts.
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
        self._max_guesses = max_guesses
        self._guard = Guard(self.price) if is_guarded else None
        self._watch = CalibrationWatch()

    def wants(self, rooms: Mapping[str, int]) -> bool:
        """Return whether the next step of these requests, which may still write so many tokens each, drafts."""
        return bool(rooms) and (self._guard is None or self._guard.drafts(rooms))

    def price(self, batch: int) -> float:
        """Return how many plain steps a step takes, by the cost table, that verifies all guesses."""
        if self._table is None:
            return _UNKNOWN_PRICE
        seconds = self._table.step_seconds(batch)(batch * (1 + self._max_guesses))
        return seconds / max(self._table.plain_seconds(batch), 1e-9)

    def is_promising(self, batch: int) -> bool:
        """Return whether drafting should pay by the cost table and what was kept so far; True without a table."""
        if self._table is None:
            return True
        expected = [self._history.survival(self._max_guesses)] * batch
        return is_drafting_worth(expected, self._table.step_seconds(batch), self._table.plain_seconds(batch))

    def judge(self, proposal: Proposal) -> Proposal:
        """Return a proposal with the chances that its guesses are kept."""
        return replace(proposal, chances=survival(proposal, self._scale, self._history))

    def lengths(self, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many guesses of each judged proposal to verify."""
        if self._table is None:
            return [len(proposal) for proposal in proposals]
        chances = [proposal.chances or () for proposal in proposals]
        return synchronous_lengths(chances, self._table.step_seconds(len(proposals)))

    def note_round(self, proposal: Proposal | None, kept: int) -> None:
        """Take what became of one sequence's guesses, those that were verified."""
        if proposal:
            self._history.add(len(proposal), kept)
            self._watch.add(proposal.chances or (), kept)

    def note_step(self, tokens: Mapping[str, int], *, is_drafted: bool, seconds: float | None) -> None:
        """Take what a step brought each request; `seconds` is None where it also read prompts."""
        if self._guard is not None:
            self._guard.add(tokens, is_drafted=is_drafted, seconds=seconds)

    def note_plain(self, names: Collection[str], seconds: Sequence[float]) -> None:
        """Take steps that neither drafted nor read prompts, each of which brought each request one token."""
        if self._guard is not None:
            self._guard.add_plain(names, seconds)

    def forget(self, name: str) -> None:
        """Let go of a request."""
        if self._guard is not None:
            self._guard.forget(name)

    def report(self) -> dict[int, GuardReport]:
        """Return tokens per second with and without drafts by size of batch, as far as measured."""
        return {} if self._guard is None else self._guard.report()

    def gain(self, batch: int) -> float | None:
        """Return tokens per second with drafts over those without, at this size of batch; None if not measured."""
        return None if self._guard is None or not batch else self._guard.gain(batch)

    @property
    def wait(self) -> float:
        """Steps before which the requests that `wants` was last asked about will not draft."""
        return 0.0 if self._guard is None else self._guard.wait

    def status(self) -> dict[str, float]:
        """Return the guard's report and the calibration error as flat numbers; what was not measured is left out.

        Keys: `draft_calibration_guesses`, `draft_calibration_error`, and for each size of batch N that was met
        `draft_batch_N_with`, `_without` (tokens/s), `_paused` (0 or 1), `_probes`, `_pauses`.
        """
        found: dict[str, float] = {"draft_calibration_guesses": len(self._watch)}
        error = self._watch.error()
        if error is not None:
            found["draft_calibration_error"] = error
        for batch, report in self.report().items():
            start = f"draft_batch_{batch}_"
            rates = {"with": report.with_drafts, "without": report.without}
            found |= {start + way: rate for way, rate in rates.items() if rate is not None}
            found |= {start + "paused": int(report.is_paused), start + "probes": report.probes}
            found[start + "pauses"] = report.pauses
        return found
