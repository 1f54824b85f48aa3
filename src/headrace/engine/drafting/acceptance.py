"""Which guesses stay, and what follows them: a function of the model's logits, the guesses and the sampling state.

Greedy and keyed: the model's own token is taken at every position as it would be without drafting, with the noise of
(seed, position); a guess stays if it is that token. The answer is the one without drafting, whatever the drafter does.

Exact rules (block verification; standard rejection is the reference): more guesses stay, and the answer has the right
distribution, but it is another draw than without drafting, and depends on the guesses.

`token_ids[i]` of a result comes from row i of the logits, so the sequence keeps as many of its new rows as the result
has tokens: those of the newest token and of the kept guesses that something follows.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import HeadraceError, InternalError
from headrace.engine.drafting.block_verification import keep_block
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.rejection import keep_tokens
from headrace.engine.sampling.noise import Purpose, exponential_noise, uniform_draws
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import RowError, next_weights, sample
from headrace.engine.sampling.state import SamplerState


class Rule(Enum):
    """How guesses are judged at a temperature above 0; at 0 all are greedy."""

    KEYED = "keyed"
    BLOCK = "block"
    REJECTION = "rejection"


@dataclass(frozen=True)
class Accepted:
    """How an answer goes on.

    `token_ids` are at least one: `num_guessed` kept guesses, then a token of the model's own unless the last guess ends
    the answer or nothing is known behind it.
    """

    token_ids: tuple[int, ...]
    num_guessed: int


def rule_for(params: SamplingParams) -> Rule:
    """Return the rule of a request: keyed, unless it draws and asks for block verification by name.

    A request that only sets a seed is keyed, so that the seed fixes its answer. One that sets a seed and names block
    verification gets that: the seed then fixes its random numbers, but its answer depends on the guesses as well.
    """
    return Rule.BLOCK if params.acceptance == "block" and params.temperature > 0 else Rule.KEYED


def accept(rule: Rule, logits_RV: Tensor, proposal: Proposal, state: SamplerState) -> Accepted:
    """Judge the guesses of one sequence.

    Args:
        rule: at temperature 0 any is greedy.
        logits_RV: [R, V] float32 of the model behind the newest token and the first R - 1 guesses, R at least 1.
            Guess R, if there is one, is judged too: its own row would only say what follows it. More guesses are not.
        proposal: the guesses, any number.
        state: at the position of the first guess; not touched.

    Raises:
        RowError: row 0 has no token; see `pipeline.sample_batch`. A later row's failure ends the run before it, so
            that it is met where it would be without drafting: as row 0 of a later step.
    """
    if logits_RV.dim() != 2 or not len(logits_RV):
        raise InternalError(f"logits of shape {list(logits_RV.shape)} were given to judge; [R, V] is accepted")
    guesses = proposal.cut(len(logits_RV))
    if state.is_plain:
        return accept_greedy(logits_RV, guesses.token_ids, state)
    if rule is Rule.KEYED or state.params.temperature == 0 or not guesses:
        return accept_keyed(logits_RV, guesses.token_ids, state)
    return _accept_exactly(rule, logits_RV, guesses, state)


def accept_greedy(logits_RV: Tensor, guesses: tuple[int, ...], state: SamplerState) -> Accepted:
    """Keep guesses that are the largest logit (ties to the lower id); for states whose logits nothing changes."""
    peaks, largest = logits_RV.max(-1)
    own, is_sound = largest.tolist(), torch.isfinite(peaks).tolist()
    if not is_sound[0]:
        raise RowError(f"the largest logit of row 0 is {float(peaks[0])}, so it has no next token", 0)
    ids: list[int] = []
    for row, token_id in enumerate(own):
        if not is_sound[row]:
            return Accepted(tuple(ids), len(ids))
        ids.append(token_id)
        if row >= len(guesses) or guesses[row] != token_id:
            return Accepted(tuple(ids), row)
        if token_id in state.end_ids:
            break
    return Accepted(tuple(ids), len(ids))


def accept_keyed(logits_RV: Tensor, guesses: tuple[int, ...], state: SamplerState) -> Accepted:
    """Keep guesses that are what `pipeline.sample` takes at their position, penalties and structure moved along."""
    moving, ids = state, list[int]()
    for row, logits_V in enumerate(logits_RV):
        try:
            token_id = sample(logits_V, moving)
        except RowError:
            if row == 0:
                raise
            break
        ids.append(token_id)
        if row >= len(guesses) or guesses[row] != token_id:
            return Accepted(tuple(ids), row)
        if row + 1 == len(logits_RV):
            break
        moving = state.copy() if moving is state else moving
        if _ends(moving, token_id):
            break
    return Accepted(tuple(ids), len(ids))


def _ends(moving: SamplerState, token_id: int) -> bool:
    """Move a state and return whether nothing can follow; a structure that fails is met again by the answer itself."""
    try:
        return moving.accept(token_id)
    except HeadraceError:
        return True


def _accept_exactly(rule: Rule, logits_RV: Tensor, guesses: Proposal, state: SamplerState) -> Accepted:
    rows, moved = _distributions(logits_RV, guesses, state)
    count = min(len(rows), len(guesses))
    target = torch.stack(rows).unsqueeze(0)
    draft = guesses.probabilities
    if draft is not None:
        draft = draft[:count].unsqueeze(0).to(target)
        draft = draft / draft.sum(-1, keepdim=True)
    ids = torch.tensor([guesses.token_ids[:count]], dtype=torch.int64, device=target.device)
    # drawn anew in every run: what is left of an earlier one's numbers is known to be large
    uniform = torch.from_numpy(uniform_draws(count, state.seed, state.position, Purpose.ACCEPT)[np.newaxis])
    keep = keep_block if rule is Rule.BLOCK else keep_tokens
    kept = keep(target, draft, ids, uniform.to(target.device))
    num_kept = int(kept.num_kept)
    run = guesses.token_ids[:num_kept]
    if num_kept == len(rows):
        return Accepted(run, num_kept)
    if num_kept == count:
        return Accepted((*run, sample(logits_RV[num_kept], moved)), num_kept)
    noise = exponential_noise(target.shape[-1], state.seed, state.position + num_kept).to(target.device)
    return Accepted((*run, int((kept.weights[0] / noise).argmax())), num_kept)


def _distributions(logits_RV: Tensor, guesses: Proposal, state: SamplerState) -> tuple[list[Tensor], SamplerState]:
    """Return what the model draws from at each position, [V] float64 that add up to one, and the state at the last.

    There is none behind a guess that ends the answer or that cannot come, nor from a row that fails on.
    """
    moving, rows = state, list[Tensor]()
    for row, logits_V in enumerate(logits_RV):
        try:
            weights = next_weights(logits_V, moving).double()
        except RowError:
            if row == 0:
                raise
            break
        rows.append(weights / weights.sum())
        if row + 1 == len(logits_RV) or row >= len(guesses) or not weights[guesses.token_ids[row]] > 0:
            break
        moving = state.copy() if moving is state else moving
        if _ends(moving, guesses.token_ids[row]):
            break
    return rows, moving
