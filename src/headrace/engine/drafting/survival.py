"""How likely a run of guesses is to be kept: what the scheduler of verify lengths works with.

The chance that guess k is kept depends on guesses before k only, never on guess k itself; that keeps the exact rules
exact (`verify_length`).
"""

import numpy as np

from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.temperatures import Scale, survival_of


class KeptSoFar:
    """Estimates the chance of each place of a drafter without confidences from what was kept of its earlier guesses.

    Counts fade by `fade` a round; `prior` rounds at a chance of one half stand at the beginning. One for each drafter
    and length of match; shared by the sequences.
    """

    def __init__(self, max_guesses: int, *, fade: float = 0.98, prior: float = 4.0) -> None:
        self._tried = np.full(max_guesses, prior)
        self._kept = np.full(max_guesses, prior / 2)
        self._fade = fade

    def add(self, num_judged: int, num_kept: int) -> None:
        """Take the result of one round: of `num_judged` guesses the first `num_kept` stayed."""
        reached = np.arange(len(self._tried)) < min(num_judged, num_kept + 1)
        stayed = np.arange(len(self._tried)) < num_kept
        # a place that was not reached has learned nothing, so its counts do not fade
        self._tried = np.where(reached, self._tried * self._fade + 1, self._tried)
        self._kept = np.where(reached, self._kept * self._fade + stayed, self._kept)

    def survival(self, count: int) -> tuple[float, ...]:
        """Return the chance that the first k guesses stay, k = 1 .. `count`."""
        return tuple(np.cumprod(self._kept / self._tried)[:count].tolist())


def survival(proposal: Proposal, scale: Scale, history: KeptSoFar) -> tuple[float, ...]:
    """Return the chance that the first k guesses of a proposal stay, [L], never rising.

    Args:
        proposal: its confidences are used where it has some.
        scale: of the draft; `Scale.neutral` for one that was not calibrated.
        history: what is used otherwise.
    """
    if proposal.confidences is None:
        return history.survival(len(proposal))
    logits = np.array([proposal.confidences], dtype=np.float64)
    rows = survival_of(np.nan_to_num(logits), scale)
    return tuple(rows[0].tolist())
