"""Products of queries and weights with picked entries, each row's own or those that all rows share."""

import torch
from torch import Tensor

from headrace.kernels.product import COLUMN_TILE, default_linear, pad_rows

_MANY_HEADS = 4  # rows of a product from which the library sums each of them alike


def _is_one_product(num_heads: int, entries_RKH: Tensor) -> bool:
    """Tell whether rows that share entries can be one product: it gives the bits of theirs apart from four heads on."""
    return entries_RKH.shape[0] == 1 and num_heads >= _MANY_HEADS and entries_RKH.shape[1] % COLUMN_TILE == 0


def entry_scores(q_RQH: Tensor, entries_RKH: Tensor) -> Tensor:
    """Return dot products [R, Q, K] with each row's entries, or those that all rows share."""
    num_rows, num_heads, width = q_RQH.shape
    if _is_one_product(num_heads, entries_RKH):
        return default_linear(q_RQH.reshape(-1, width), entries_RKH[0]).view(num_rows, num_heads, -1)
    return torch.bmm(q_RQH, entries_RKH.expand(num_rows, -1, -1).transpose(1, 2))


def entry_values(weights_RQK: Tensor, entries_RKH: Tensor) -> Tensor:
    """Return the weighted sums [R, Q, H] of each row's entries, or of those that all rows share."""
    num_rows, num_heads, num_slots = weights_RQK.shape
    if _is_one_product(num_heads, entries_RKH):
        rows = num_rows * num_heads
        flat = pad_rows(weights_RQK.view(rows, num_slots))
        return torch.mm(flat, entries_RKH[0])[:rows].view(num_rows, num_heads, -1)
    return torch.bmm(weights_RQK, entries_RKH.expand(num_rows, -1, -1))
