"""A forward pass without a model: writes to every part of a state what its tokens alone say."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.cache.state_shape import StateShape
from headrace.kernels.block_quant import fake_q8
from headrace.kernels.compress_pool import pool_pairs

WINDOW = 6
SHAPE = StateShape(
    head_dim=32,
    index_head_dim=64,
    window=WINDOW,
    num_layers=3,
    num_draft_layers=1,
    decoder_start=2,
    source_ratios={0: 2, 2: 1},
    lookback=3,
)
# any token at any position has its own vectors, so that a row of a rejected token is never mistaken for another
VECTORS = torch.randn((50, 7, 64), generator=torch.Generator().manual_seed(3))


def vectors(tokens: Sequence[int], first: int, part: int, width: int) -> Tensor:
    ids = (torch.tensor(tokens, dtype=torch.int64) * 7 + torch.arange(first, first + len(tokens)) * 3) % 50
    return VECTORS[ids, part, :width]


def forward(state: SequenceState, tokens: Sequence[int]) -> None:
    """Write to every part what a forward pass over these tokens would write, from the tokens alone."""
    if not tokens:
        return
    first, shape = state.length, state.shape
    for layer_id, store in state.stores.items():
        if store.ratio == 1:
            entries = vectors(tokens, first, 0, shape.head_dim).bfloat16()
        else:
            values, gates = vectors(tokens, first, 1, shape.head_dim), vectors(tokens, first, 2, shape.head_dim)
            history = state.pairs[layer_id]
            if first % 2:
                value, gate = history.read(first - 1)
                joined = torch.cat([value, values]), torch.cat([gate, gates])
            else:
                joined = values, gates
            history.store(first, values, gates)
            pairs = joined[0].shape[0] // 2
            cut = [part[: 2 * pairs].view(pairs, 2, shape.head_dim) for part in joined]
            entries = pool_pairs(cut[0], cut[1])
        store.append(entries, entries.repeat(1, 2) * 0.5)
    for place, ring in enumerate(state.rings + state.draft_rings):
        ring.store(first, fake_q8(vectors(tokens, first, 3 + place % 4, shape.head_dim).bfloat16()))
    state.commit(len(tokens), np.array(tokens, dtype=np.int64) % 13)
