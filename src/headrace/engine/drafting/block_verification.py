"""Block verification: keep as long a run of drawn guesses as one can while the answers' distribution stays exact.

With p_k the model's distribution of guess k and q_k the one that it was drawn from:

    rho_0 = 1, rho_k = min(1, rho_{k-1} p_k(x_k) / q_k(x_k))
    m_k   = sum over x of max(rho_k p_{k+1}(x) - q_{k+1}(x), 0)
    h_k   = m_k / (m_k + 1 - rho_k) for k < L, h_L = rho_L

The kept run is the longest k with u_k <= h_k, u_k uniform and independent of the guesses. Behind a run of k < L comes a
token from max(rho_k p_{k+1} - q_{k+1}, 0), behind all of them one from p_{L+1}. Guesses that were not drawn have q of 1
at themselves. On average at least as many guesses are kept as by testing one after the other.

Source: serving.md section 5.4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Kept:
    """What a rule decided for N sequences.

    Attributes:
        num_kept: [N] int64, guesses of each that stay.
        weights: [N, V] float64, what the token behind them is drawn from, not made to add up to one; all zeros where
            every guess stays and there is no row of the model behind the last.
    """

    num_kept: Tensor
    weights: Tensor


def keep_block(target_NRV: Tensor, draft_NLV: Tensor | None, ids_NL: Tensor, uniform_NL: Tensor) -> Kept:
    """Decide by the rule above, each sequence alone.

    Args:
        target_NRV: [N, R, V] the model's distributions behind the newest token and the guesses; R is L + 1, or L where
            nothing is known behind the last guess.
        draft_NLV: [N, L, V] what the guesses were drawn from; None where they were not drawn.
        ids_NL: [N, L] int64 the guesses, L at least 1.
        uniform_NL: [N, L] independent uniform variates inside (0, 1).

    Numerics: float64, rho in log space. Where p_{k+1} = q_{k+1} and rho_k = 1, h_k is 0 / 0 and taken as 1. Where
        rounding leaves a rejected run no weight behind it, p itself is what the token is drawn from.
    """
    count = ids_NL.shape[1]
    target, draft = target_NRV.double(), None if draft_NLV is None else draft_NLV.double()
    log_rho = torch.zeros((len(ids_NL), count + 1), dtype=torch.float64, device=target.device)
    ratio = log_ratio(target, draft, ids_NL)
    for k in range(count):
        log_rho[:, k + 1] = (log_rho[:, k] + ratio[:, k]).clamp(max=0)
    rest = leftover(log_rho[:, :-1].exp(), target, draft, ids_NL)
    mass, missing = rest.sum(-1)[:, 1:], -torch.expm1(log_rho[:, 1:-1])
    inner = torch.where(mass + missing > 0, mass / (mass + missing), torch.ones_like(mass))
    chances = torch.cat([inner, log_rho[:, -1:].exp()], 1)
    places = torch.arange(1, count + 1, device=target.device)
    num_kept = ((uniform_NL <= chances) * places).max(1).values
    return Kept(num_kept, weights_behind(num_kept, rest, target))


def log_ratio(target_NRV: Tensor, draft_NLV: Tensor | None, ids_NL: Tensor) -> Tensor:
    """Return log(p(x) / q(x)) of every guess, [N, L] float64; -inf where the model rules it out."""
    picked = ids_NL.unsqueeze(-1)
    log_p = target_NRV[:, : ids_NL.shape[1]].gather(-1, picked).squeeze(-1).log()
    return log_p if draft_NLV is None else log_p - draft_NLV.gather(-1, picked).squeeze(-1).log()


def leftover(rho_NL: Tensor, target_NRV: Tensor, draft_NLV: Tensor | None, ids_NL: Tensor) -> Tensor:
    """Return max(rho p - q, 0) at every place, [N, L, V] float64."""
    scaled = rho_NL.unsqueeze(-1) * target_NRV[:, : ids_NL.shape[1]]
    if draft_NLV is None:  # q is 1 at the guess, and rho p is at most that
        return scaled.scatter(-1, ids_NL.unsqueeze(-1), 0.0)
    return (scaled - draft_NLV).clamp(min=0)


def weights_behind(num_kept_N: Tensor, rest_NLV: Tensor, target_NRV: Tensor) -> Tensor:
    """Return what the token behind each run is drawn from, [N, V]; see `Kept.weights`."""
    rows, count, every = target_NRV.shape[1], rest_NLV.shape[1], torch.arange(len(num_kept_N), device=rest_NLV.device)
    cut = rest_NLV[every, num_kept_N.clamp(max=count - 1)]
    plain = target_NRV[every, num_kept_N.clamp(max=rows - 1)]
    is_cut = (num_kept_N < count).unsqueeze(-1)
    weights = torch.where(is_cut & (cut.sum(-1, keepdim=True) > 0), cut, plain)
    return weights if rows > count else weights * is_cut


def draw(weights_NV: Tensor, noise_NV: Tensor) -> Tensor:
    """Return the winners of the exponential race, [N] int64: token x wins with chance weights(x) / sum of weights."""
    return (weights_NV / noise_NV).argmax(-1)
