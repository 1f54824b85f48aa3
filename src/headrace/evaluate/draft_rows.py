"""Rows to calibrate a draft on: what it was sure of along greedy continuations of held-out text, and what was accepted.

The same columns as `train/calibration.py` collects at the end of training, from the serving path and from any text:
many short continuations of many prompts, so that the rows depend on each other as little as they can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import UserError
from headrace.evaluate.held_out import HeldOut
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train.data.packing import Ids

_AT_ONCE = 12


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Where prompts are cut: `prompt_tokens` each, one every `stride_tokens`, continued by `tokens` tokens."""

    prompt_tokens: int = 256
    stride_tokens: int = 192
    tokens: int = 48


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftRows:
    """R anchors of X drafts.

    `confidence` [R, X] float64 raw logits, `accepted` [R, X] bool (this draft and all before it), `document` [R] int64.
    """

    confidence: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    document: NDArray[np.int64]


def collect_rows(
    model: DeepseekV41, held_out: HeldOut, settings: RowSettings, progress: Callable[[str], object]
) -> DraftRows:
    """Continue every prompt greedily and draft at every position of what was written.

    Raises:
        UserError: the model has no draft, or the text has no prompt that is long enough.
    """
    if model.config.draft is None:
        raise UserError("the checkpoint has no draft module, so there is nothing to calibrate", param="path")
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    prompts = list(_prompts(held_out, settings))
    if not prompts:
        raise UserError(
            f"{held_out.path} has no document of {settings.prompt_tokens} tokens; longer documents are accepted", "text"
        )
    confidence, accepted, owners = [], [], []
    for low in range(0, len(prompts), _AT_ONCE):
        progress(f"drafting: prompt {low + 1} of {len(prompts)}")
        part = prompts[low : low + _AT_ONCE]
        for (document, _), one in zip(part, _continue(model, [ids for _, ids in part], settings.tokens), strict=True):
            sure, right = _draft_along(model, drafter, *one)
            confidence.append(sure)
            accepted.append(right)
            owners.append(np.full(len(right), document))
    return DraftRows(
        confidence=np.concatenate(confidence), accepted=np.concatenate(accepted), document=np.concatenate(owners)
    )


def _prompts(held_out: HeldOut, settings: RowSettings) -> Iterator[tuple[int, Ids]]:
    """Yield document and prompt: its first token (begin of text), then a piece of it."""
    for document in range(len(held_out.text)):
        ids = held_out.ids(document)
        for start in range(1, len(ids) - settings.prompt_tokens, settings.stride_tokens):
            yield document, np.append(ids[:1], ids[start : start + settings.prompt_tokens - 1])


@torch.inference_mode()
def _continue(model: DeepseekV41, prompts: list[Ids], count: int) -> list[tuple[int, Ids, Tensor]]:
    """Return per prompt the position of the first tap, the tokens written, and the taps [R, n * D] before each."""
    states = [model.new_state() for _ in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    taps: list[list[Tensor]] = [[] for _ in prompts]
    rows = min(model.config.window, len(prompts[0]))
    live = list(range(len(prompts)))
    spans = [Span(states[i], prompts[i], rows, is_replay=True) for i in live]
    while live:
        output = model.forward(spans, wants_taps=True)
        if output.taps is None:
            break
        for i, logits, own in zip(live, output.logits, output.taps.chunk(len(live)), strict=True):
            written[i].append(int(logits.argmax()))
            taps[i].append(own)
        live = [i for i in live if len(written[i]) < count and written[i][-1] != model.config.eos_token_id]
        spans = [Span(states[i], np.array(written[i][-1:]), 1) for i in live]
    first = len(prompts[0]) - rows
    return [(first, np.array(written[i]), torch.cat(taps[i])) for i in range(len(prompts))]


def _draft_along(
    model: DeepseekV41, drafter: Drafter, first: int, written: Ids, taps: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Draft behind every written token whose whole block can be compared: confidences and accepted, [A, X] each."""
    block = model.config.draft.block_size if model.config.draft else 0
    state = model.new_state()
    for ring in state.draft_rings:
        ring.restart(first)
    prompt_rows = len(taps) - len(written) + 1
    drafter.observe(state, first, taps[:prompt_rows])
    confidence, ids = np.zeros((0, block)), np.zeros((0, block), dtype=np.int64)
    for place in range(len(written) - block):
        if place:
            drafter.observe(state, first + prompt_rows + place - 1, taps[prompt_rows + place - 1 : prompt_rows + place])
        proposal = drafter.propose(state, int(written[place]))
        confidence = np.concatenate([confidence, proposal.confidence.double().numpy()[None]])
        ids = np.concatenate([ids, proposal.ids.numpy()[None]])
    known = np.lib.stride_tricks.sliding_window_view(written[1:], block)[: len(ids)] if len(ids) else ids
    return confidence, np.logical_and.accumulate(ids == known, axis=1)
