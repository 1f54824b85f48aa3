"""Rotation of float32 heads in one pass, with the bits of `kernels/rope.py`, its reference.

Numerics: float32; two products and their sum round apart.
What bounds it: reading and writing the heads once.
Source: spec section 3.3.1.
"""

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool, library: Library | None = None
) -> Tensor | None:
    """Return `x` [T, ..., H] with its last dimensions rotated by [T, P / 2] angles; None where there is no kernel."""
    library = library or best_library()
    is_plain = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in (x, cos, sin))
    if library is None or not is_plain:
        return None
    given = [one.contiguous() for one in (x, cos, sin)]
    out = torch.empty_like(given[0])
    rows, pairs, width = x.shape[0], cos.shape[1], x.shape[-1]
    heads = x[:1].numel() // width
    library.use_threads(torch.get_num_threads())
    run = library.function("hr_train_rotate", 9)
    run(*(one.data_ptr() for one in (*given, out)), rows, heads, width, pairs, inverse)
    return out
