"""Standard speculative sampling: guesses are tested one after the other. What block verification is compared with.

Guess x of distribution q is kept with chance min(1, p(x) / q(x)); behind the first that is not comes a token from
max(p - q, 0), behind all of them one from the model.

Source: serving.md section 5.4.
"""

import torch
from torch import Tensor

from headrace.engine.drafting.block_verification import Kept, leftover, log_ratio, weights_behind


def keep_tokens(target_NRV: Tensor, draft_NLV: Tensor | None, ids_NL: Tensor, uniform_NL: Tensor) -> Kept:
    """Decide by the rule above, each sequence alone; arguments as `block_verification.keep_block`.

    Numerics: float64. Where rounding leaves a rejected guess no weight behind it, p itself is drawn from.
    """
    target, draft = target_NRV.double(), None if draft_NLV is None else draft_NLV.double()
    chances = log_ratio(target, draft, ids_NL).exp().clamp(max=1)
    num_kept = (uniform_NL <= chances).long().cummin(1).values.sum(1)
    rest = leftover(torch.ones_like(chances), target, draft, ids_NL)
    return Kept(num_kept, weights_behind(num_kept, rest, target))
