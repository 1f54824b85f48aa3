"""The indexer in PyTorch, in the kernels' order of summation; one row at a time."""

import torch
from torch import Tensor

from headrace.kernels.block_quant import e2m1_values, encode_q4i
from headrace.kernels.native.index import Shape
from headrace.kernels.native.product.reference import multiply_add


def scores(q_JI: Tensor, weights_J: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 scores [C] of stored keys for one row of rotated bfloat16 queries."""
    query_codes, query_scales = encode_q4i(q_JI)
    q, k = e2m1_values(query_codes).float(), e2m1_values(codes).float()
    of_q, of_k = (torch.exp2(part.double() - 127.0).float() for part in (query_scales, scales))
    total = torch.zeros((q.shape[0], k.shape[0]))
    for group in range(of_k.shape[1]):
        part = torch.zeros_like(total)
        for column in range(32 * group, 32 * group + 32):
            part = multiply_add(q[:, column ^ 1, None], k[None, :, column ^ 1], part)
        total = multiply_add(part, of_q[:, group, None] * of_k[None, :, group], total)
    terms = total.to(torch.bfloat16).relu() * weights_J.unsqueeze(1)
    out = torch.zeros(k.shape[0])
    for head in range(terms.shape[0]):
        out = out + terms[head].float()
    return out.to(torch.bfloat16)


def select(found: Tensor, shape: Shape, pool: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return picks [K] and kept blocks [B] (None without a pool) for the scores of all visible entries."""
    visible = found.shape[0]
    blocks, is_open = None, bool(shape.pool_blocks) and visible > shape.pool_blocks * shape.block_size
    if shape.writes_pool:
        blocks = torch.full((shape.pool_blocks,), -1)
        if visible > shape.top_k and is_open:
            padded = torch.nn.functional.pad(found.float(), (0, -visible % shape.block_size), value=float("-inf"))
            peaks = padded.view(-1, shape.block_size).amax(1)
            peaks[(visible - 1) // shape.block_size] = float("inf")
            blocks = _first(peaks, torch.arange(len(peaks)), shape.pool_blocks)
    if visible <= shape.top_k:
        return torch.nn.functional.pad(torch.arange(visible), (0, shape.top_k - visible), value=-1), blocks
    positions = torch.arange(visible)
    if is_open and pool is not None and not shape.writes_pool:
        kept = pool[pool >= 0]
        positions = (kept.unsqueeze(1) * shape.block_size + torch.arange(shape.block_size)).view(-1)
        positions = positions[positions < visible]
    return _first(found[positions].float(), positions, shape.top_k), blocks


def _first(values: Tensor, names: Tensor, count: int) -> Tensor:
    """Return the names of the highest values, the lower name of equal ones, ascending, -1 after."""
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    picked = names[order].sort().values
    return torch.nn.functional.pad(picked, (0, count - len(picked)), value=-1)
