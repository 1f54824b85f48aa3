"""Rows to calibrate a draft on: what it was sure of along greedy continuations of held-out text, and what was kept.

A row is one round as the engine drafts: behind what the round before kept and the token that the model chose itself,
with the context of the newest window of committed positions. (Drafts at every position would be another kind of row:
behind a guess that was wrong the next ones are right less often than their confidence says of all positions.) Many
short continuations of many prompts, so that the rows depend on each other as little as they can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import UserError
from headrace.engine.core.dspark import DSpark
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.evaluate.held_out import HeldOut
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train.calibration import Calibration
from headrace.train.data.packing import Ids

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Where prompts are cut.

    Attributes:
        prompt_tokens: of each prompt.
        stride_tokens: from one prompt of a document to the next.
        most_prompts: of a long text, about; its stride is longer then.
        tokens: that each is continued by. Few, because greedy text comes to repeat itself, and then its rounds do.
    """

    prompt_tokens: int = 256
    stride_tokens: int = 96
    most_prompts: int = 1500
    tokens: int = 64


@dataclass
class _Answer:
    """One continuation while it is written.

    `known` are its prompt and what was written; `taps` those of committed positions that the drafter has not heard of;
    `guesses` are those of the open round, made when `began` tokens were known, `kept` of them right so far.
    """

    document: int
    known: list[int]
    num_prompt: int
    state: SequenceState
    taps: list[Tensor] = field(default_factory=list)
    guesses: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    began: int = 0
    kept: int = 0

    def take(self, token_id: int) -> bool:
        """Take the next token; return whether that ends the open round."""
        self.known.append(token_id)
        if not self.guesses:
            return False
        if self.kept < len(self.guesses) and token_id == self.guesses[self.kept]:
            self.kept += 1
            return False
        return True

    def begin(self, guesses: tuple[int, ...], confidences: tuple[float, ...]) -> None:
        """Open a round."""
        self.guesses, self.confidences, self.began, self.kept = guesses, confidences, len(self.known), 0


@torch.inference_mode()
def collect_rows(
    model: DeepseekV41,
    vocab_size: int,
    held_out: HeldOut,
    settings: RowSettings,
    progress: Callable[[str], object],
) -> Calibration:
    """Continue every prompt greedily and draft as the engine would.

    Args:
        model: with its draft module.
        vocab_size: ids from here on have no token.
        held_out: text that the model never saw.
        settings: see `RowSettings`.
        progress: gets a line now and then.

    Returns:
        Rounds in order of document and position, `acceptance` left out.

    Raises:
        UserError: the model has no draft, or the text has no prompt that is long enough.
    """
    if model.config.draft is None:
        raise UserError("the checkpoint has no draft module, so there is nothing to calibrate", param="path")
    prompts = list(_prompts(held_out, settings))
    if not prompts:
        raise UserError(
            f"{held_out.path} has no document of {settings.prompt_tokens} tokens; longer documents are accepted", "text"
        )
    writer = _Writer(model, vocab_size)
    block = model.config.draft.block_size
    rows: list[tuple[int, int, int, tuple[float, ...], int]] = []
    for low in range(0, len(prompts), _AT_ONCE):
        progress(f"drafting: prompt {low + 1} of {len(prompts)}")
        for place, one in writer.rounds(prompts[low : low + _AT_ONCE], settings.tokens):
            if len(one.confidences) == block:
                rows.append((one.document, low + place, one.began - 2, one.confidences, one.kept))
    rows.sort(key=lambda row: row[:3])
    kept = torch.tensor([row[4] for row in rows], dtype=torch.int64)
    return Calibration(
        confidence=torch.tensor([row[3] for row in rows], dtype=torch.float32).reshape(len(rows), block),
        accepted=(torch.arange(block) < kept.unsqueeze(1)).to(torch.uint8),
        document=torch.tensor([row[0] for row in rows], dtype=torch.int64),
        position=torch.tensor([row[2] for row in rows], dtype=torch.int64),
        is_round=torch.ones(len(rows), dtype=torch.uint8),
    )


def _prompts(held_out: HeldOut, settings: RowSettings) -> Iterator[tuple[int, Ids]]:
    """Yield document and prompt: its first token (begin of text), then a piece of it."""
    stride = max(settings.stride_tokens, int(held_out.text.offsets[-1]) // settings.most_prompts)
    for document in range(len(held_out.text)):
        ids = held_out.ids(document)
        for start in range(1, len(ids) - settings.prompt_tokens, stride):
            yield document, np.append(ids[:1], ids[start : start + settings.prompt_tokens - 1])


class _Writer:
    """Writes answers and drafts along them."""

    def __init__(self, model: DeepseekV41, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._drafter = DSpark(model, vocab_size)

    def rounds(self, prompts: list[tuple[int, Ids]], count: int) -> Iterator[tuple[int, _Answer]]:
        """Write all answers together; yield prompt's place and answer at the end of every round of it."""
        model = self._model
        answers = [_Answer(document, ids.tolist(), len(ids), model.new_state()) for document, ids in prompts]
        live = list(range(len(answers)))
        rows = min(model.config.window, len(prompts[0][1]))
        spans = [Span(answers[i].state, prompts[i][1], rows, is_replay=True) for i in live]
        while live:
            output = model.forward(spans, wants_taps=True)
            tokens = output.logits[:, : self._vocab_size].argmax(-1).tolist()
            taps = () if output.taps is None else output.taps.chunk(len(live))
            for i, token_id, own in zip(live, tokens, taps, strict=True):
                answers[i].taps.append(own)
                if answers[i].take(token_id):
                    yield i, answers[i]
                    answers[i].guesses = ()
            live = [i for i in live if self._goes_on(answers[i], count)]
            self._draft([answers[i] for i in live if not answers[i].guesses])
            spans = [Span(answers[i].state, np.array(answers[i].known[-1:]), 1) for i in live]

    def _goes_on(self, one: _Answer, count: int) -> bool:
        """Whether a round is open or may begin: one that begins ends within `count` tokens, whatever is kept."""
        has_room = len(one.known) + self._drafter.max_guesses + 1 <= one.num_prompt + count
        return one.known[-1] != self._model.config.eos_token_id and (bool(one.guesses) or has_room)

    def _draft(self, answers: list[_Answer]) -> None:
        """Open a round in every answer."""
        told, wanted = [], []
        for one in answers:
            taps = torch.cat(one.taps)
            one.taps.clear()
            length = len(one.known) - 1
            ids = np.array(one.known[length - len(taps) : length], dtype=np.int64)
            told.append(Committed(name="", first=length - len(taps), token_ids=ids, taps=taps, state=one.state))
            wanted.append(
                Wanted(
                    name="",
                    token_id=one.known[-1],
                    count=self._drafter.max_guesses,
                    choice=Choice(self._sampler(ids)),
                    state=one.state,
                )
            )
        if told:
            self._drafter.observe(told)
            for one, proposal in zip(answers, self._drafter.propose(wanted), strict=True):
                one.begin(proposal.token_ids, proposal.confidences or ())

    def _sampler(self, ids: Ids) -> SamplerState:
        """Return one that takes the largest logit and goes on behind an end: every block has all its guesses."""
        end = self._model.config.eos_token_id
        params = SamplingParams(ignore_eos=True)
        return SamplerState(params, ids, seed=0, eos_token_id=end, vocab_size=self._vocab_size, matcher=None)
