"""How a drafter turns its logits into guesses: the way the request itself is sampled, one token after the other.

A guess that went through the request's own penalties, structure, temperature and cuts is more often kept, and under the
exact rules its distribution must be one that is known. One `Choice` lives for one block of guesses.
"""

import torch
from torch import Tensor

from headrace.core.errors import HeadraceError
from headrace.engine.sampling.noise import Purpose, exponential_noise
from headrace.engine.sampling.pipeline import RowError, next_weights, sample
from headrace.engine.sampling.state import SamplerState


class Choice:
    """Picks one guess after the other. Owns a copy of the sequence's sampling state, which it moves along.

    `is_drawn` False is for greedy and keyed acceptance: the guess is what the request's own sampler would take from
    these logits at this position, noise included, so a drafter that knows the model's logits is always right. True is
    for the exact rules: the guess is drawn with noise of its own, and its distribution is kept.
    """

    def __init__(self, state: SamplerState, *, is_drawn: bool = False) -> None:
        """Stand where `state` stands, at the position of the first guess; the state itself is not touched."""
        self._state = state.copy()
        self._first = state.position
        self._is_drawn = is_drawn and state.params.temperature > 0
        self._rows: list[Tensor] = []
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether no guess can follow."""
        return self._has_ended

    def pick(self, logits_V: Tensor) -> int | None:
        """Return the next guess from a drafter's logits, [V] float32; None where guessing has to stop.

        It stops behind a token that ends the answer, and where these logits leave no token that may come: what a
        drafter gets wrong costs a guess, never a request.
        """
        if self._has_ended:
            return None
        try:
            token_id = self._draw(logits_V) if self._is_drawn else sample(logits_V, self._state)
        except RowError:
            self._has_ended = True
            return None
        try:
            self._has_ended = self._state.accept(token_id)
        except HeadraceError:  # the structure goes no further; the model's own token meets the same end
            self._has_ended = True
        return token_id

    def probabilities(self) -> Tensor | None:
        """Return the distributions of the guesses so far, [L, V] float32; None where they were not drawn."""
        return torch.stack(self._rows) if self._rows else None

    def _draw(self, logits_V: Tensor) -> int:
        state = self._state
        row = next_weights(logits_V, state)
        index = state.position - self._first
        noise = exponential_noise(len(row), state.seed, self._first, Purpose.DRAFT, index).to(row.device)
        self._rows.append(row / row.sum())
        return int((row / noise).argmax())
