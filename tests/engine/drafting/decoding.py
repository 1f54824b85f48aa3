"""A model whose logits are a function of the text, decoded plainly and with guesses. No test lives here."""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.engine.drafting.acceptance import Rule, accept
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.sampling.pipeline import RowError, sample
from headrace.engine.sampling.state import SamplerState

Model = Callable[[tuple[int, ...]], Tensor]
Guesser = Callable[[tuple[int, ...], SamplerState], Proposal]


def logits_of(text: tuple[int, ...], vocab: int, sharpness: float = 2.0) -> Tensor:
    """Return random logits, [V] float32, that the last three tokens of a text fix."""
    seed = zlib.crc32(np.array(text[-3:], dtype=np.int64).tobytes())
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * sharpness


def plain(model: Model, prompt: tuple[int, ...], state: SamplerState, count: int) -> list[int]:
    """Return up to `count` tokens, one at a time."""
    state, ids = state.copy(), list[int]()
    while len(ids) < count:
        token_id = sample(model((*prompt, *ids)), state)
        ids.append(token_id)
        if state.accept(token_id):
            break
    return ids


def drafted(
    model: Model, prompt: tuple[int, ...], state: SamplerState, count: int, guesser: Guesser, rule: Rule = Rule.KEYED
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return what drafting makes of the same, and (guesses, kept ones) of each round."""
    state, ids, rounds = state.copy(), list[int](), list[tuple[int, int]]()
    while len(ids) < count:
        text = (*prompt, *ids)
        proposal = guesser(text, state).cut(count - len(ids) - 1)
        rows = torch.stack([model((*text, *proposal.token_ids[:n])) for n in range(len(proposal) + 1)])
        accepted = accept(rule, rows, proposal, state)
        assert accepted.token_ids
        assert accepted.num_guessed <= len(accepted.token_ids) <= accepted.num_guessed + 1
        assert accepted.token_ids[: accepted.num_guessed] == proposal.token_ids[: accepted.num_guessed]
        rounds.append((len(proposal), accepted.num_guessed))
        for place, token_id in enumerate(accepted.token_ids):
            ids.append(token_id)
            if state.accept(token_id):
                assert place + 1 == len(accepted.token_ids), "tokens came behind the end of the answer"
                return ids, rounds
    return ids, rounds


def outcome(decode: Callable[[], list[int]]) -> list[int] | str:
    """Return the tokens, or why there are none; the row of a batch is not part of that."""
    try:
        return decode()
    except (RowError, UserError) as error:
        return str(error.__cause__ or error)
