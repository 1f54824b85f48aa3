"""What the frozen backbone writes itself, through the cached path in full mode, many documents at once.

Training may learn from such ends instead of the corpus', and held-out documents that the backbone continued greedily
say which drafts it would have accepted: at every position its choice is the document's next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Batch, Ids, Sample, next_token_labels
from headrace.train.passes import labelled_runs

_PREFILL_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt, the tokens to add at most, and the stream of numbers that decides them."""

    token_ids: Ids
    room: int
    draws: Draws


class Target:
    """The served backbone as a writer. Owns no state between calls."""

    def __init__(self, model: DeepseekV41, num_ids: int) -> None:
        """Take over a model; ids from `num_ids` on have no token and are never written."""
        self._model, self._num_ids = model, num_ids

    def continue_all(self, prompts: Sequence[Prompt], temperature: float) -> list[Ids]:
        """Return each prompt with what follows it, up to its room or the end token.

        Args:
            prompts: each at least one token, with room for at least one.
            temperature: 0 takes the largest logit, ties to the lower id.

        Numerics: a continuation depends on its own prompt and draws only.
        """
        states = [self._model.new_state() for _ in prompts]
        written = [prompt.token_ids.tolist() for prompt in prompts]
        waiting = list(range(len(prompts)))
        pending: list[list[int]] = [list(ids) for ids in written]
        while waiting:
            for places in _groups(waiting, pending):
                spans = [Span(states[place], np.array(pending[place]), len(pending[place])) for place in places]
                logits = self._model.forward(spans).logits[:, : self._num_ids]
                for place, row in zip(places, logits, strict=True):
                    token = _choose(row, temperature, prompts[place].draws)
                    written[place].append(token)
                    pending[place] = [token]
            waiting = [place for place in waiting if self._goes_on(prompts[place], written[place])]
        return [np.array(ids, dtype=np.int64) for ids in written]

    def _goes_on(self, prompt: Prompt, written: list[int]) -> bool:
        return len(written) < len(prompt.token_ids) + prompt.room and written[-1] != self._model.config.eos_token_id


def _groups(waiting: Sequence[int], pending: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cut what is to be read into forward passes of bounded size."""
    groups: list[list[int]] = []
    filled = _PREFILL_TOKENS
    for place in waiting:
        if filled + len(pending[place]) > _PREFILL_TOKENS:
            groups.append([])
            filled = 0
        groups[-1].append(place)
        filled += len(pending[place])
    return groups


def _choose(logits_V: Tensor, temperature: float, draws: Draws) -> int:
    """Choose a token; above temperature 0 by the exponential race."""
    if temperature == 0:
        return int((logits_V == logits_V.max()).int().argmax())
    scores = torch.softmax((logits_V - logits_V.max()) / temperature, -1).double().numpy()
    return int(np.argmax(scores / -np.log(draws.uniform(len(scores)) + 2.0**-54)))


def samples_of(batch: Batch) -> list[list[Sample]]:
    """Return the documents of every row of a batch."""
    return [
        [
            Sample(
                token_ids=batch.token_ids[row, span.start : span.start + span.length],
                labels=batch.labels[row, span.start : span.start + span.length],
                kind=kind,
            )
            for span, kind in zip(batch.spans[row], batch.kinds[row], strict=True)
        ]
        for row in range(len(batch.token_ids))
    ]


def cut_prompt(sample: Sample, block_size: int, draws: Draws) -> int | None:
    """Return how many tokens of a document are the prompt; None where no draft would fit behind it.

    Text is cut at random in its middle half; any other document behind the row that asks first.
    """
    longest = len(sample) - block_size - 2
    if sample.kind == "text":
        low, high = max(1, len(sample) // 4), min(3 * len(sample) // 4, longest)
        return draws.between(low, high) if low <= high else None
    runs = list(labelled_runs(sample.labels))
    return runs[0][0] + 1 if runs and runs[0][0] + 1 <= longest else None


def continue_samples(
    target: Target,
    samples: Sequence[Sample],
    cuts: Sequence[int],
    draws: Sequence[Draws],
    *,
    tokens: int,
    temperature: float,
) -> list[Sample]:
    """Replace what follows the prompts by what the target writes; nothing but that is asked.

    Args:
        target: writes.
        samples: the documents.
        cuts: tokens of each that are the prompt.
        draws: one stream per document.
        tokens: of a continuation at most; none becomes longer than its document.
        temperature: see `Target`.
    """
    prompts = [
        Prompt(sample.token_ids[:cut], min(tokens, len(sample) - cut), one)
        for sample, cut, one in zip(samples, cuts, draws, strict=True)
    ]
    continued = []
    for sample, cut, ids in zip(samples, cuts, target.continue_all(prompts, temperature), strict=True):
        labels = next_token_labels(ids)
        labels[: cut - 1] = IGNORE
        continued.append(Sample(token_ids=ids, labels=labels, kind=sample.kind))
    return continued
