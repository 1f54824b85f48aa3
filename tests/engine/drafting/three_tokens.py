"""A model and a drafter over three tokens, and many rounds of drafting at once. No test lives here."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.engine.drafting.block_verification import Kept, draw

SAMPLES = 200_000
V = 3

Keep = Callable[[Tensor, Tensor | None, Tensor, Tensor], Kept]


class Chain:
    """Distributions over the next token by the tokens before: `rows[n]` is [3**n, 3]."""

    def __init__(self, seed: int, depth: int, sharpness: float = 1.5) -> None:
        numbers = np.random.default_rng(seed)
        self.rows = [torch.from_numpy(_softmax(sharpness * numbers.normal(size=(V**n, V)))) for n in range(depth)]

    def behind(self, ids_NL: Tensor) -> Tensor:
        """Return what comes behind each of N texts of the same length, [N, 3]."""
        return self.rows[ids_NL.shape[1]][code(ids_NL)]

    def joint(self, length: int) -> np.ndarray:
        """Return the probability of every text of a length, [3**length]."""
        result = torch.ones(1, dtype=torch.float64)
        for n in range(length):
            result = (result.unsqueeze(1) * self.rows[n]).flatten()
        return result.numpy()


def code(ids_NL: Tensor) -> Tensor:
    """Return each text read as a number in base 3, [N]."""
    result = torch.zeros(len(ids_NL), dtype=torch.int64)
    for column in ids_NL.T:
        result = result * V + column
    return result


class Numbers:
    """Independent random numbers for the rounds of one test."""

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.default_rng(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._numbers.uniform(1e-12, 1, size=shape))

    def noise(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._numbers.exponential(size=shape))

    def drawn(self, weights_NV: Tensor) -> Tensor:
        return draw(weights_NV, self.noise(*weights_NV.shape))


def guess(draft: Chain, numbers: Numbers, count: int, length: int, *, is_drawn: bool) -> Tensor:
    """Return guesses, [count, length]: drawn from the drafter, or its most probable ones."""
    ids = torch.zeros((count, 0), dtype=torch.int64)
    for _ in range(length):
        behind = draft.behind(ids)
        token = numbers.drawn(behind) if is_drawn else behind.argmax(-1)
        ids = torch.cat([ids, token.unsqueeze(1)], 1)
    return ids


def rows_along(chain: Chain, ids_NL: Tensor, count: int) -> Tensor:
    """Return the distributions behind the first 0 .. `count` - 1 tokens of each text, [N, count, 3]."""
    return torch.stack([chain.behind(ids_NL[:, :n]) for n in range(count)], 1)


def judge(
    keep: Keep, target: Chain, draft: Chain | None, ids_NL: Tensor, numbers: Numbers, *, has_bonus: bool = True
) -> tuple[Tensor, Tensor]:
    """Judge guesses; return what each text became and how many of its tokens count, [N, L + 1] and [N]."""
    count, length = ids_NL.shape
    kept = keep(
        rows_along(target, ids_NL, length + has_bonus),
        None if draft is None else rows_along(draft, ids_NL, length),
        ids_NL,
        numbers.uniform(count, length),
    )
    has_more = kept.weights.sum(1) > 0
    own = numbers.drawn(kept.weights)
    texts = torch.cat([ids_NL, torch.zeros((count, 1), dtype=torch.int64)], 1)
    texts[torch.arange(count), kept.num_kept] = torch.where(has_more, own, texts[torch.arange(count), kept.num_kept])
    return texts, kept.num_kept + has_more


def complete(target: Chain, texts_NL: Tensor, valid_N: Tensor, numbers: Numbers) -> Tensor:
    """Go on from the valid tokens of each text without drafting, to the same length, [N, L]."""
    texts = texts_NL.clone()
    for n in range(texts.shape[1]):
        texts[:, n] = torch.where(n < valid_N, texts[:, n], numbers.drawn(target.behind(texts[:, :n])))
    return texts


def chi_square(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the statistic of counts against probabilities, and the limit that chance passes once in 100,000 times.

    Outcomes of probability 0 must not have come; those expected less than five times count as one.
    """
    assert not found[expected == 0].any()
    counts = found.sum() * expected
    is_rare = counts < 5
    found = np.append(found[~is_rare], found[is_rare].sum())
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    found, counts = found[counts > 0], counts[counts > 0]
    statistic = float(((found - counts) ** 2 / counts).sum())
    freedom = len(counts) - 1
    spread = 2 / (9 * freedom)
    return statistic, float(freedom * (1 - spread + 4.27 * spread**0.5) ** 3)  # Wilson and Hilferty


def follows(found: Tensor, expected: np.ndarray) -> bool:
    """Return whether texts, as `code` numbers them, follow a distribution."""
    statistic, limit = chi_square(np.bincount(found.numpy(), minlength=len(expected)), expected)
    return statistic < limit


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
