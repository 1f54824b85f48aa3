"""From logits to token ids. Every row alone, in float32: a token depends on its own logits and state, on no batch.

The order, each step on what the one before left:

1. logit bias is added;
2. penalties: repetition (prompt and answer), then frequency and presence (answer);
3. while the answer is shorter than `min_tokens`, tokens that would end it are impossible;
4. tokens the structure does not allow are impossible;
5. at temperature 0 the largest logit is taken, ties to the lower id, and nothing below matters;
6. temperature;
7. top-k;
8. min-p, relative to the most probable token;
9. top-p, of the probabilities that 7 and 8 left, made to add up to one;
10. the exponential race: probability over noise keyed by (seed, position), the largest wins.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.errors import HeadraceError, InternalError, UserError
from headrace.engine.sampling.noise import exponential_noise
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.ranking import keep_top_k, keep_top_p
from headrace.engine.sampling.state import SamplerState

_TINY = 1e-30  # a temperature below this is the same as this, and float32 can still divide by it


class RowError(InternalError):
    """Say that a row of a batch has no token; the other rows can be sampled again without it, to the same tokens.

    Attributes:
        row: the row's index.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def sample_batch(logits_BV: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Choose the next token of every row; the same as `sample` row by row.

    Args:
        logits_BV: [B, V] float32, unchanged on return.
        states: one per row; none of them changes until it accepts its token.

    Raises:
        RowError: a row holds NaN or +inf, or nothing but -inf, or its structure fails (then `__cause__` says how).
    """
    if logits_BV.dtype != torch.float32 or logits_BV.shape[0] != len(states):
        raise InternalError(
            f"logits of {logits_BV.dtype} and {tuple(logits_BV.shape)} were given for {len(states)} states; "
            "float32 and one row per state is accepted"
        )
    peaks, largest = logits_BV.max(-1)  # NaN counts as the largest; of equals the lower id comes back
    for row, peak in enumerate(peaks.tolist()):
        if not math.isfinite(peak):
            raise RowError(f"the largest logit of row {row} is {peak}, so it has no next token", row)
    tokens: list[int] = largest.tolist()
    for row, state in enumerate(states):
        if not state.is_plain:
            tokens[row] = _choose(logits_BV[row], state, row)
    return tokens


def sample(logits_V: Tensor, state: SamplerState) -> int:
    """Choose the next token of one sequence from its logits, [V] float32; see `sample_batch`."""
    return sample_batch(logits_V.unsqueeze(0), [state])[0]


def next_weights(logits_V: Tensor, state: SamplerState) -> Tensor:
    """Return what the next token of one sequence is drawn from, steps 1 to 9; see `weights`. Temperature is above 0.

    Raises:
        RowError: as `sample_batch`, of row 0.
    """
    peak = float(logits_V.max())
    if not math.isfinite(peak):
        raise RowError(f"the largest logit of row 0 is {peak}, so it has no next token", 0)
    return weights(_possible(logits_V, state, 0), state.params)


def _choose(logits_V: Tensor, state: SamplerState, row: int) -> int:
    logits_V = _possible(logits_V, state, row)
    if state.params.temperature == 0:
        return int(logits_V.argmax())
    probabilities = weights(logits_V, state.params)
    noise = exponential_noise(len(probabilities), state.seed, state.position).to(probabilities.device)
    return int((probabilities / noise).argmax())


def _possible(logits_V: Tensor, state: SamplerState, row: int) -> Tensor:
    """Return adjusted logits, the largest of which is finite."""
    try:
        logits_V = adjust(logits_V, state)
    except HeadraceError as error:
        raise RowError(f"row {row} has no next token: {error.message}", row) from error
    if not math.isfinite(float(logits_V.max())):
        raise RowError(f"row {row} has no next token", row) from UserError(
            "bias, penalties and stop ids leave no token that may come next; weaker ones, or a smaller min_tokens, are "
            "accepted",
            param="logit_bias",
        )
    return logits_V


def adjust(logits_V: Tensor, state: SamplerState) -> Tensor:
    """Return the logits after steps 1 to 4, [V] float32: a copy, or the same tensor where nothing changes.

    Raises:
        UserError: the structure became too complex to follow.
    """
    if not state.is_adjusted:
        return logits_V
    params, device = state.params, logits_V.device
    logits_V = logits_V.clone()
    if state.bias is not None:
        ids, bias = state.bias
        logits_V[ids.to(device)] += bias.to(device)
    if state.seen is not None:
        ids = state.seen.ids.to(device)
        logits = logits_V[ids]
        logits_V[ids] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    if state.generated is not None:
        ids, counts = state.generated.ids.to(device), state.generated.counts.to(device)
        logits_V[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if state.needs_more:
        logits_V[list(state.end_ids)] = -torch.inf
    if state.matcher is not None:
        state.matcher.mask(logits_V)
    return logits_V


def weights(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return what steps 6 to 9 make of adjusted logits: [V] float32 probabilities, zero for tokens that were cut.

    Those that top-p left keep their values, so they may add up to less than one.

    Args:
        logits_V: [V] float32; the largest is finite.
        params: temperature above 0, and the cuts.
    """
    # the largest logit is taken off first, so that a tiny temperature cannot overflow
    logits_V = (logits_V - logits_V.max()) / max(params.temperature, _TINY)
    if params.top_k is not None:
        logits_V = keep_top_k(logits_V, params.top_k)
    if params.min_p > 0:
        logits_V = logits_V.masked_fill(torch.exp(logits_V) < params.min_p, -torch.inf)
    probabilities = torch.softmax(logits_V, -1)
    return keep_top_p(probabilities, params.top_p) if params.top_p < 1 else probabilities
