"""The batches of a run: rows of text and rows of generated tasks, in given shares.

Everything follows from the seed, the step and the text cursor, so a run that stops and resumes sees the same batches
as one that does not. Sequence length and batch size may change at any step.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.core.errors import UserError
from headrace.train.data.cursor import POOL_PIECES, TextCursor
from headrace.train.data.documents import TokenizedText
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Batch, PackedRow, Sample, pack_row, stack_rows
from headrace.train.data.special_tokens import PAD_ID
from headrace.train.data.tasks.task import Task

TEXT = "text"  # the kind of rows that are no task's


class WeightedTask(NamedTuple):
    """A task and its share of the rows; shares are relative to the sum of all, text included."""

    task: Task
    weight: float


class Stream:
    """Owns the order of a run's batches: the step to come and the place in the text."""

    def __init__(
        self,
        *,
        seed: int,
        text: TokenizedText | None = None,
        text_weight: float = 1.0,
        tasks: Sequence[WeightedTask] = (),
        pad_id: int = PAD_ID,
        pool_pieces: int = POOL_PIECES,
    ) -> None:
        """Stand before step 0.

        Args:
            seed: of the run.
            text: documents for text rows; None for none.
            text_weight: share of text rows; not used without text.
            tasks: generated tasks with their shares; names must differ.
            pad_id: id of padding.
            pool_pieces: see `TextCursor`.

        Raises:
            UserError: there is nothing to make rows of, a share is negative, or two tasks have one name.
        """
        self._seed, self._pad_id, self._step = seed, pad_id, 0
        self._tasks = tuple(task for task, _ in tasks)
        self._cursor = None if text is None else TextCursor(text, seed, pool_pieces)
        self._text_hash = "" if text is None else _hash_of(text)
        names = [task.name for task in self._tasks]
        if len(set(names)) < len(names):
            raise UserError(f"the tasks of a mixture need different names; these are {names}", param="tasks")
        self._weights = {
            TEXT: text_weight if text is not None else 0.0,
            **{task.name: weight for task, weight in tasks},
        }
        self._bounds({})

    @property
    def step(self) -> int:
        """The step that `next_batch` makes next."""
        return self._step

    @property
    def epoch(self) -> int:
        """How many times the whole text was started again; 0 without text."""
        return 0 if self._cursor is None else self._cursor.epoch

    def check_shares(self, shares: Mapping[str, float]) -> None:
        """Refuse shares that `next_batch` would refuse.

        Raises:
            UserError: names the kind or the shares.
        """
        self._bounds(shares)

    def next_batch(self, step: int, seq_len: int, batch_rows: int, shares: Mapping[str, float] | None = None) -> Batch:
        """Return the batch of a step and go on to the next one.

        Of `batch_rows` rows each kind gets its share, rounded up or down at random by step.

        Args:
            step: must be `self.step`; asked for so that loop and stream cannot drift apart unnoticed.
            seq_len: tokens of a row, at least 1.
            batch_rows: rows, at least 1.
            shares: kind, "text" or the name of a task -> its share of this batch; the others keep theirs.

        Raises:
            UserError: another step is asked for, a size is below 1, or a task does not fit into a row.
        """
        if step != self._step:
            raise UserError(f"the data stream stands at step {self._step}, not at {step}; restore the matching state")
        if seq_len < 1 or batch_rows < 1:
            raise UserError(f"a batch of {batch_rows} rows of {seq_len} tokens is empty; both must be at least 1")
        offset = Draws(self._seed, "mixture", step).uniform(1)
        kinds = np.searchsorted(self._bounds(shares or {}), (np.arange(batch_rows) + offset) / batch_rows, side="right")
        rows = [
            self._row(min(int(kind), len(self._tasks)), step, row, seq_len) for row, kind in enumerate(kinds.tolist())
        ]
        self._step += 1
        return stack_rows(rows)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON can hold it."""
        return {
            "seed": self._seed,
            "step": self._step,
            "text_hash": self._text_hash,
            "text": None if self._cursor is None else self._cursor.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the step that `state` described; the batches from there on are those of an uninterrupted run.

        Raises:
            UserError: the state is damaged, or of a run with another seed or text.
        """
        try:
            seed, step, text_hash, place = int(state["seed"]), int(state["step"]), state["text_hash"], state["text"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the resume state of the data is damaged: {error!r}", param="resume") from error
        if seed != self._seed or step < 0:
            raise UserError(f"the resume state is of seed {seed} and step {step}; this run has seed {self._seed}")
        if text_hash != self._text_hash:
            raise UserError(
                "the resume state belongs to another text: the corpus or the tokenizer changed since it was saved",
                param="resume",
            )
        if self._cursor is not None:
            self._cursor.restore(place)
        self._step = step

    def _bounds(self, shares: Mapping[str, float]) -> np.ndarray:
        """Return the upper end of each kind's share, text first, the tasks in order."""
        unknown = sorted(set(shares) - set(self._weights))
        if unknown:
            raise UserError(
                f"the mixture has no kind {unknown[0]!r}; {', '.join(self._weights)} are accepted.", param="shares"
            )
        weights = list({**self._weights, **shares}.values())
        if self._cursor is None:
            weights[0] = 0.0
        if min(weights) < 0 or not sum(weights) > 0:
            raise UserError(f"the shares of the mixture are {weights}; accepted are numbers from 0 on, not all 0")
        return np.cumsum(weights) / sum(weights)

    def _row(self, kind: int, step: int, row: int, seq_len: int) -> PackedRow:
        if kind == 0 and self._cursor is not None:
            return self._cursor.next_row(seq_len, self._pad_id)
        return task_row(self._tasks[kind - 1], self._seed, step, row, seq_len, self._pad_id)


def task_row(task: Task, seed: int, step: int, row: int, seq_len: int, pad_id: int = PAD_ID) -> PackedRow:
    """Return a row of a task: sample after sample, until the next one does not fit.

    Raises:
        UserError: not even one fits.
    """
    samples: list[Sample] = []
    room = seq_len
    while room:
        sample = task.make(Draws(seed, "task", task.name, step, row, len(samples)), room)
        if sample is None:
            break
        samples.append(sample)
        room -= len(sample)
    if not samples:
        raise UserError(f"task {task.name!r} does not fit into a row of {seq_len} tokens; make rows longer", "seq_len")
    return pack_row(samples, seq_len, pad_id)


def _hash_of(text: TokenizedText) -> str:
    digest = hashlib.blake2b(text.offsets.astype("<i8").tobytes(), digest_size=16)
    digest.update(text.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
