"""Draft tokens accepted a round, drafting along the greedy continuation of held-out code.

A round starts behind a known token, drafts a block greedily, and accepts drafts up to the first that is not the token
the model itself writes; the next round starts behind that token. This is what greedy speculative decoding accepts. The
control drafts in the same rounds from the taps of another prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.evaluate.estimate import Comparison, Control, Estimate, compare, must_differ, ratio
from headrace.evaluate.held_out import HeldOut
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import Subject
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train.data.packing import Ids


@dataclass(frozen=True, eq=False)
class Continuation:
    """A prompt and what the model wrote behind it.

    `token_ids` [N] both, `num_prompt` tokens of the prompt, `taps` [R, n * D] of positions `first` onwards: the
    replayed end of the prompt and every token but the last.
    """

    token_ids: Ids
    num_prompt: int
    taps: Tensor
    first: int


@dataclass(frozen=True, eq=False)
class DraftReport:
    """What `judge_drafting` found.

    Attributes:
        accepted: draft tokens a round, the token that the model adds itself not counted.
        shuffled: the same rounds with the context of another prompt.
        per_position: share of the rounds that accept the draft at each place of the block.
        conditional: the same among rounds that accepted all before it; None where there is none.
        rounds, proposed, prompts: counts.
    """

    accepted: Estimate
    shuffled: Estimate
    per_position: list[float]
    conditional: list[float | None]
    rounds: int
    proposed: int
    prompts: int
    comparisons: list[Comparison]
    controls: list[Control]


def judge_drafting(
    subject: Subject, held_out: HeldOut, settings: Settings, progress: Callable[[str], object]
) -> DraftReport | None:
    """Draft along greedy continuations; None where the model has no draft module or there are not two prompts."""
    config, model = subject.config, subject.model
    if config.draft is None:
        return None
    prompts = code_prompts(held_out, settings)
    if len(prompts) < 2:
        return None
    written = []
    for place, ids in enumerate(prompts):
        progress(f"drafting: prompt {place + 1} of {len(prompts)}")
        written.append(write_greedily(model, ids, settings.draft_tokens))
    drafter = Drafter(config, model.parameters, model.frequencies.plain)
    own, shuffled = [], []
    for place, one in enumerate(written):
        rounds = accepted_rounds(model, drafter, one)
        own.append([accepted for _, accepted in rounds])
        other = written[(place + 1) % len(written)]
        shuffled.append([count_accepted(model, drafter, one, start, other) for start, _ in rounds])
    return _report(own, shuffled, config.draft.block_size)


def code_prompts(held_out: HeldOut, settings: Settings) -> list[Ids]:
    """Return the beginnings of different documents, all of one length."""
    size = settings.draft_prompt_tokens
    long_enough = [held_out.ids(place)[:size] for place in held_out.code() if held_out.text.length(place) > size]
    return long_enough[: settings.draft_prompts]


def write_greedily(model: DeepseekV41, prompt_ids: Ids, count: int) -> Continuation:
    """Read a prompt in replay mode and continue it greedily by up to `count` tokens."""
    state, rows = model.new_state(), min(model.config.window, len(prompt_ids))
    output = model.forward([Span(state, prompt_ids, rows, is_replay=True)], wants_taps=True)
    written = [int(output.logits[-1].argmax())]
    taps = [output.taps]
    while len(written) < count and written[-1] != model.config.eos_token_id:
        output = model.forward([Span(state, np.array(written[-1:]), 1)], wants_taps=True)
        written.append(int(output.logits[-1].argmax()))
        taps.append(output.taps)
    joined = torch.cat([one for one in taps if one is not None])
    return Continuation(np.append(prompt_ids, written), len(prompt_ids), joined, len(prompt_ids) - rows)


def accepted_rounds(model: DeepseekV41, drafter: Drafter, written: Continuation) -> list[tuple[int, int]]:
    """Return position and accepted drafts of every round whose whole block can be compared.

    A round at position p has observed tokens up to p, knows the token at p + 1, and drafts those behind it.
    """
    block = model.config.draft.block_size if model.config.draft else 0
    rounds = []
    position = written.num_prompt - 1
    while position + 1 + block < len(written.token_ids):
        accepted = count_accepted(model, drafter, written, position, written)
        rounds.append((position, accepted))
        position += accepted + 1
    return rounds


def count_accepted(
    model: DeepseekV41, drafter: Drafter, written: Continuation, position: int, context: Continuation
) -> int:
    """Draft at a position of `written` from the taps of `context` and count drafts up to the first wrong one."""
    state = model.new_state()
    last = min(position - context.first, len(context.taps) - 1) + 1
    taps = context.taps[max(0, last - model.config.window) : last]
    first = position + 1 - len(taps)
    for ring in state.draft_rings:
        ring.restart(first)
    drafter.observe(state, first, taps)
    drafts = drafter.propose(state, int(written.token_ids[position + 1])).ids.numpy()
    wanted = written.token_ids[position + 2 : position + 2 + len(drafts)]
    wrong = np.flatnonzero(drafts[: len(wanted)] != wanted)
    return int(wrong[0]) if len(wrong) else len(wanted)


def _report(own: Sequence[list[int]], shuffled: Sequence[list[int]], block: int) -> DraftReport:
    rounds = [float(len(one)) for one in own]
    sums = [float(sum(one)) for one in own]
    broken = [float(sum(one)) for one in shuffled]
    flat = [accepted for one in own for accepted in one]
    survived = [sum(accepted > place for accepted in flat) for place in range(block)]
    reached = [len(flat), *survived[:-1]]
    apart = compare("accepted_per_round: context of another prompt minus own", "tokens", broken, sums, rounds)
    return DraftReport(
        accepted=ratio(sums, rounds),
        shuffled=ratio(broken, rounds),
        per_position=[count / max(1, len(flat)) for count in survived],
        conditional=[count / before if before else None for count, before in zip(survived, reached, strict=True)],
        rounds=len(flat),
        proposed=block * len(flat),
        prompts=len(own),
        comparisons=[apart],
        controls=[must_differ(apart, "lower")],
    )
