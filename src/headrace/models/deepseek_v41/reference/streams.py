"""Parallel residual streams with single-pass mixes (manifold-constrained hyper-connections).

Each half of a block (attention, then experts) computes three sets of coefficients from the streams *before* it runs.
It uses `post` and `comb` itself to write its output back; its `pre` is how the *next* half reads the streams. The very
first half reads stream 0 alone. Read `model.block` next to see the timing.

Source: specification sections 3.0 to 3.2; released `inference/model.py`, `Block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config
    from headrace.models.deepseek_v41.reference.arithmetic import Weights


class Mixes(NamedTuple):
    """Coefficients of one half of a block, all float32.

    Attributes:
        pre: [T, M] weights with which the next half sums the streams into its input.
        post: [T, M] weight of this half's output in every stream.
        comb: [T, M, M] how streams flow on; first stream axis = source, second = destination.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def start(h_TD: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
    """Copy an embedding into every stream and select stream 0 as what the first half reads.

    Args:
        h_TD: [T, D] bfloat16.
        num_streams: M.

    Returns:
        Streams [T, M, D] bfloat16 and the pending pre-mix [T, M] float32 = (1, 0, ..., 0).
    """
    x_TMD = h_TD[:, None].repeat(1, num_streams, 1)
    pre_TM = torch.zeros(h_TD.shape[0], num_streams, dtype=torch.float32, device=h_TD.device)
    pre_TM[:, 0] = 1.0
    return x_TMD, pre_TM


def mixes(weights: Weights, prefix: str, config: Config, x_TMD: Tensor) -> Mixes:
    """Compute the coefficients of one half from the streams in front of it.

    Args:
        weights: official names to tensors.
        prefix: for example `layers.3.hc_attn`; the tensors are `_fn`, `_base` and `_scale`.
        config: the model.
        x_TMD: [T, M, D] bfloat16.

    Numerics: float32; one mean square over all M x D numbers of a row; the product first, its scaling after.
    """
    flat = x_TMD.float().flatten(1)  # stream-major: index = stream * D + d
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + config.norm_eps)
    raw = (flat @ weights[f"{prefix}_fn"].T) * inverse_rms
    return coefficients(raw, weights[f"{prefix}_scale"], weights[f"{prefix}_base"], config)


def coefficients(raw: Tensor, scale: Tensor, base: Tensor, config: Config) -> Mixes:
    """Turn projections into pre, post and comb.

    Args:
        raw: [T, (2 + M) M] float32: M for pre, M for post, M x M for comb.
        scale: [3] float32, one factor per kind.
        base: [(2 + M) M] float32 offsets.
        config: the model; num_streams, sinkhorn_iterations and hc_eps are used.
    """
    m = config.num_streams
    pre = torch.sigmoid(raw[:, :m] * scale[0] + base[:m]) + config.hc_eps
    post = 2 * torch.sigmoid(raw[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (raw[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    return Mixes(pre, post, sinkhorn(logits, config.sinkhorn_iterations, config.hc_eps))


def sinkhorn(logits_TMM: Tensor, iterations: int, eps: float) -> Tensor:
    """Make matrices nearly doubly stochastic by normalising rows and columns in turn, ending on columns.

    Args:
        logits_TMM: [T, M, M] float32.
        iterations: number of column normalisations, 20 in the release.
        eps: added to every sum, and once to the softmax.

    Returns:
        [T, M, M] float32; columns sum to 1 up to eps, rows only approximately.
    """
    # written out, because the library's softmax rounds some of these numbers to the other neighbour
    a = (logits_TMM - logits_TMM.amax(dim=2, keepdim=True)).exp()
    a = a / a.sum(dim=2, keepdim=True) + eps
    a = a / (a.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(dim=2, keepdim=True) + eps)
        a = a / (a.sum(dim=1, keepdim=True) + eps)
    return a


def collapse(x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
    """Sum the streams with the pending pre-mix into the input of a half: [T, D] bfloat16, summed in float32."""
    return (pre_TM[:, :, None] * x_TMD.float()).sum(dim=1).bfloat16()


def expand(out_TD: Tensor, x_TMD: Tensor, mix: Mixes) -> Tensor:
    """Write a half's output back: stream j becomes post_j x out + sum over i of comb_ij x stream i.

    Args:
        out_TD: [T, D] bfloat16, output of the half.
        x_TMD: [T, M, D] bfloat16, the streams in front of it.
        mix: the half's own coefficients.

    Returns:
        [T, M, D] bfloat16, summed in float32. The sum runs over the *first* stream axis of comb.
    """
    carried = (mix.comb[..., None] * x_TMD.float()[:, :, None]).sum(dim=1)
    return (mix.post[:, :, None] * out_TD.float()[:, None] + carried).bfloat16()
