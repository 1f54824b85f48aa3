"""From logits to the next token; randomness is keyed by seed and position, so it depends on nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError

_SEED_LIMIT = 1 << 63
_TINY = 1e-30  # a temperature below this is the same as this, and float32 can still divide by it


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 picks the most probable token; otherwise logits are divided by it.
        top_p: keep the smallest set of most probable tokens whose probabilities reach this sum, in (0, 1].
        seed: 0 .. 2**63 - 1; None draws one, which the result reports.
        stop: strings that end the answer; they are not part of it.
        logprobs: report the log-probability of every generated token (of the model, before temperature).
        ignore_eos: go on after the end-of-sequence token.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UserError: a value is out of range.
        """
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; accepted is a whole number from 1", param="max_tokens")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}; accepted is 0 or more", param="temperature")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; accepted is above 0 up to 1", param="top_p")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < _SEED_LIMIT):
            raise UserError(f"seed is {self.seed}; accepted is a whole number to {_SEED_LIMIT - 1}", param="seed")
        if isinstance(self.stop, str):
            raise UserError(f"stop is the single string {self.stop!r}; accepted is a list of strings", param="stop")
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty; accepted is at least one character", param="stop")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def draw_seed() -> int:
    """Return a fresh random seed."""
    return int(torch.randint(0, 2**53, (1,), generator=_fresh_generator()))


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def sample_token(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """Choose the token at `position`.

    Args:
        logits_V: [V] float32; at least one is finite.
        params: temperature and top_p.
        seed: the request's seed.
        position: position of the new token in its sequence; with `seed` it fixes the noise.

    Returns:
        A token id; at temperature 0 the largest logit, ties to the lower id.

    Numerics: softmax in float32 and the exponential race (probability over exponential noise, largest wins).
    """
    if params.temperature == 0:
        return int((logits_V == logits_V.max()).int().argmax())
    # the largest logit is taken off first, so that a tiny temperature cannot overflow
    probabilities = torch.softmax((logits_V - logits_V.max()) / max(params.temperature, _TINY), -1)
    if params.top_p < 1:
        probabilities = keep_top_p(probabilities, params.top_p)
    noise = exponential_noise(len(probabilities), seed, position).to(probabilities.device)
    return int((probabilities / noise).argmax())


def exponential_noise(count: int, seed: int, position: int) -> Tensor:
    """Return [count] float32 exponential variates that are a function of `seed` and `position` alone.

    The key of the counter-based generator holds all bits of both, so no two pairs share their noise (torch's CPU
    generator would keep 32 bits of a seed). Raw bits of Philox are the same in every version of numpy.
    """
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # inside (0, 1)
    return torch.from_numpy(-np.log(uniform)).float()


def keep_top_p(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest most probable set whose sum reaches `top_p` (ties to the lower id)."""
    order = torch.sort(probabilities_V, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    kept = order.indices[before < top_p]
    out = torch.zeros_like(probabilities_V)
    out[kept] = probabilities_V[kept]
    return out


def log_probability(logits_V: Tensor, token_id: int) -> float:
    """Return the natural log-probability of a token under the model itself (temperature 1, nothing cut)."""
    return float(torch.log_softmax(logits_V, -1)[token_id])
