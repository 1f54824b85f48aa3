"""Asks for n-gram rows as early as their tokens are known: a chunk ahead in a prompt, at once for a sampled token."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

import numpy as np

from headrace.engine.core.sequence import Sequence
from headrace.engine.scheduler.plan import PrefillChunk
from headrace.memory.row_counts import NgramReads
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41


class NgramFeed:
    """Tells a model's row store what will run next. Owns nothing but what was counted before the step."""

    def __init__(self, model: DeepseekV41, chunk: int, max_rows: int, num_slots: int) -> None:
        """Begin.

        Args:
            model: its rows are asked for; one without n-gram memory needs none.
            chunk: prefill rows of one request in a step.
            max_rows: rows of a step, all requests together.
            num_slots: sequences that run at once.
        """
        self._memory = model.memory
        self._chunk, self._max_rows = chunk, max_rows
        self._store = None if model.memory is None else model.memory.store
        self._before = NgramReads()
        if self._store is not None:
            self._store.allow_ahead(2 * max_rows + num_slots)
            self._before.add(self._store.counts)  # loading and measuring read rows too

    def ahead(self, spans: Several[Span], chunks: Iterable[PrefillChunk], sequences: Mapping[str, Sequence]) -> None:
        """Ask for this step's rows, and behind them for those of the chunks that follow its chunks.

        Args:
            spans: of this step.
            chunks: prefills of this step; what follows them in their prompts is asked for, a step's rows at most.
            sequences: the requests by name.
        """
        if self._memory is None or self._store is None:
            return
        self._memory.announce(spans)
        left = self._max_rows
        for chunk in chunks:
            sequence = sequences[chunk.request_id]
            stop = min(chunk.stop + min(self._chunk, left), sequence.num_prompt)
            if chunk.stop < stop:
                left -= stop - chunk.stop
                self._announce_prompt(sequence, chunk.stop, stop)

    def sampled(self, sequences: Iterable[Sequence]) -> None:
        """Ask for the rows of each sequence's newest token, which the next step will run."""
        if self._memory is None or self._store is None:
            return
        spans = [
            Span(sequence.state, np.array(sequence.answer.token_ids[-1:], dtype=np.int64), 1)
            for sequence in sequences
            if sequence.state is not None and not sequence.is_over and sequence.answer.token_ids
        ]
        self._memory.announce(spans)

    def take_counts(self) -> NgramReads:
        """Return what was read since the last call."""
        if self._store is None:
            return NgramReads()
        grown = self._store.counts.since(self._before)
        self._before.add(grown)
        return grown

    def close(self) -> None:
        """Let go of the store's threads and files."""
        if self._store is not None:
            self._store.close()

    def _announce_prompt(self, sequence: Sequence, start: int, stop: int) -> None:
        if self._memory is None:
            return
        first = max(0, start - self._memory.addressing.lookback)
        marks = None if sequence.images is None else sequence.images.is_image(first, stop)
        self._memory.announce_part(sequence.submission.prompt_ids[first:stop], start - first, marks)
