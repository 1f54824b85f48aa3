"""Cases of selection: plain scans, the candidate source, its readers; ties, one and many heads, blocks in any order."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.block_quant import encode_q4i
from headrace.kernels.native.conformance import Case
from headrace.kernels.native.index import Index, Shape, reference
from headrace.kernels.native.library import Library
from headrace.kernels.native.samples import Samples
from headrace.kernels.rope import rotate

_PLAIN = Shape(heads=3, width=64, rotated=16, ratio=1, top_k=12, pool_blocks=0, block_size=1, writes_pool=False)
_SOURCE = replace(_PLAIN, heads=9, pool_blocks=5, block_size=4, writes_pool=True)
_SHAPES = {
    "a scan": _PLAIN,
    "one narrow head": replace(_PLAIN, heads=1, width=32),
    "ratio 2, 17 heads": replace(_PLAIN, ratio=2, heads=17, width=32, top_k=40),
    "few entries": replace(_PLAIN, top_k=100),
    "the candidate source": _SOURCE,
    "a reader": replace(_SOURCE, writes_pool=False),
    "large blocks": replace(_SOURCE, block_size=8, pool_blocks=3, top_k=3),
}
_TOTAL, _COUNT, _BLOCK = 90, 9, 30


def cases() -> list[Case]:
    """Return the cases."""
    return [_case(Samples(80 + place), name, shape) for place, (name, shape) in enumerate(_SHAPES.items())]


def _case(samples: Samples, name: str, shape: Shape) -> Case:
    values = samples.rows(_TOTAL, shape.width, 3)
    values[40:60] = values[7]  # ties
    codes, scales = encode_q4i(values)
    stored = [torch.cat([part[60:], part[:30], part[30:60]]) for part in (codes, scales)]
    blocks = torch.tensor([1, 2, 0])
    q, weights = samples.rows(_COUNT, shape.heads * shape.width, 2), samples.normal(_COUNT, shape.heads).bfloat16()
    first = _TOTAL * shape.ratio - _COUNT
    turn = samples.turn(first, _COUNT, shape.rotated)
    kept = torch.zeros((_COUNT, shape.pool_blocks), dtype=torch.int64)
    for row in range(_COUNT if shape.pool_blocks else 0):
        order = samples.normal(56 // shape.block_size).argsort()
        kept[row] = order[: shape.pool_blocks].sort().values

    def run(library: Library) -> list[Tensor]:
        picks, pool = torch.empty((_COUNT, shape.top_k), dtype=torch.int64), kept.clone()
        place = (0, _COUNT, first, *(part.data_ptr() for part in (*stored, blocks)), _BLOCK, picks.data_ptr())
        table = np.array([(*place, pool.data_ptr() if shape.pool_blocks else 0)])
        Index(library, shape)((q.clone(), weights, *turn), table)
        return [picks, pool]

    def wanted() -> list[Tensor]:
        turned, picks, pool = rotate(q.view(_COUNT, shape.heads, -1), *turn), [], kept.clone()
        for row in range(_COUNT):
            visible = (first + row + 1) // shape.ratio
            found = reference.scores(turned[row], weights[row], codes[:visible], scales[:visible])
            one, written = reference.select(found, shape, kept[row] if shape.pool_blocks else None)
            picks.append(one)
            if written is not None:
                pool[row] = written
        return [torch.stack(picks), pool]

    return Case(name, run, wanted)
