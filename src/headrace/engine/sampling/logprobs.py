"""Log-probabilities of chosen tokens and of their alternatives, under the model itself: temperature 1, nothing cut.

Every row alone, with the same arithmetic for prompts and answers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.result import TokenLogprob
from headrace.engine.sampling.ranking import largest_ids


def token_logprob(logits_V: Tensor, token_id: int, num_top: int = 0) -> TokenLogprob:
    """Return how probable a token was.

    Args:
        logits_V: [V] float32 of the model, before anything changed them.
        token_id: the token.
        num_top: alternatives to report.
    """
    values = torch.log_softmax(logits_V, -1)
    own = values[token_id]
    rank = 1 + int((values > own).sum()) + int((values[:token_id] == own).sum())
    ids = largest_ids(values, num_top) if num_top else torch.empty(0, dtype=torch.int64)
    top = tuple(zip(ids.tolist(), values[ids.to(values.device)].tolist(), strict=True))
    return TokenLogprob(token_id=int(token_id), logprob=float(own), rank=rank, top=top)


def log_probability(logits_V: Tensor, token_id: int) -> float:
    """Return the log-probability of a token, without rank and alternatives."""
    return float(torch.log_softmax(logits_V, -1)[token_id])


def target_logprobs(
    logits_TV: Tensor, target_ids: Sequence[int] | NDArray[np.int64], num_top: int = 0
) -> list[TokenLogprob]:
    """Return how probable the token after each row was; for prompts that are read in chunks.

    Args:
        logits_TV: [T, V] float32.
        target_ids: [T] the token that follows each row.
        num_top: alternatives to report.
    """
    if len(logits_TV) != len(target_ids):
        raise InternalError(f"{len(logits_TV)} rows of logits were given for {len(target_ids)} tokens")
    return [token_logprob(row, int(token_id), num_top) for row, token_id in zip(logits_TV, target_ids, strict=True)]


def prompt_logprobs(
    logits_NV: Tensor, prompt_ids: Sequence[int] | NDArray[np.int64], num_top: int = 0
) -> list[TokenLogprob | None]:
    """Return one entry per prompt token; the first has none, since nothing stands before it.

    Args:
        logits_NV: [N, V] float32; row i is what the model says after token i, so the last row is not used.
        prompt_ids: [N] the prompt.
        num_top: alternatives to report.
    """
    if len(logits_NV) != len(prompt_ids):
        raise InternalError(f"{len(logits_NV)} rows of logits were given for a prompt of {len(prompt_ids)} tokens")
    return [None, *target_logprobs(logits_NV[:-1], prompt_ids[1:], num_top)]
