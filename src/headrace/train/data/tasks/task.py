"""What a generated task is, and how a text with marked answers becomes a sample.

Text tasks spell their special tokens out and are encoded as one text, exactly as a server encodes a rendered prompt,
so a model meets the same tokens when it is asked.
"""

import bisect
from typing import NamedTuple, Protocol

import numpy as np

from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Answer, Sample, next_token_labels


class Task(Protocol):
    """A rule that makes samples."""

    @property
    def name(self) -> str:
        """Name for metrics and for the task's own random stream; unique within a mixture."""

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a sample of at most `room` tokens, None where the task needs more; a function of the arguments."""


class Judged(NamedTuple):
    """Characters start to stop - 1 of a text are an answer; its clue, if it has one, ends before `clue_stop`."""

    start: int
    stop: int
    clue_stop: int | None


class Script:
    """Owns a text under construction that knows which of its characters are to be learned and which are judged."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._parts: list[str] = []
        self._len = 0
        self._learned: list[tuple[int, int]] = []
        self._judged: list[Judged] = []

    def __len__(self) -> int:
        return self._len

    def context(self, text: str) -> None:
        """Add text that is only read."""
        self._parts.append(text)
        self._len += len(text)

    def learned(self, text: str) -> None:
        """Add text to be learned, e.g. reasoning or the end of a turn."""
        self._learned.append((self._len, self._len + len(text)))
        self.context(text)

    def answer(self, text: str, clue_stop: int | None = None) -> None:
        """Add text to be learned and judged."""
        self._judged.append(Judged(self._len, self._len + len(text), clue_stop))
        self.learned(text)

    def sample(self, encoder: Encoder, kind: str) -> Sample:
        """Encode the whole text.

        Parts that are learned must begin and end where tokens do; a special token or a digit on either side sees to
        that.
        """
        ids, starts = encoder.marked("".join(self._parts))
        token_ids = np.array(ids, dtype=np.int64)
        is_asked = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in self._learned:
            is_asked[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, stop)] = True
        answers = []
        for judged in self._judged:
            first, end = bisect.bisect_left(starts, judged.start), bisect.bisect_left(starts, judged.stop)
            clue = None if judged.clue_stop is None else bisect.bisect_left(starts, judged.clue_stop) - 1
            # the token before an answer predicts its first token
            answers.append(Answer(first - 1, end - first, None if clue is None else first - 1 - clue))
        return Sample(
            token_ids=token_ids, labels=next_token_labels(token_ids, is_asked), kind=kind, answers=tuple(answers)
        )


def ask(script: Script, question: str, answer: str, *, reasoning: str = "", clue_stop: int | None = None) -> None:
    """Add the rest of a user's turn and the whole answer: reasoning where there is any, answer, end token.

    Source: specification 9.
    """
    if reasoning:
        script.context(question + special_tokens.ASSISTANT + special_tokens.THINK)
        script.learned(reasoning + special_tokens.END_THINK)
    else:
        script.context(question + special_tokens.ASSISTANT + special_tokens.END_THINK)
    script.answer(answer, clue_stop)
    script.learned(special_tokens.END)


def single_question(question: str, answer: str, reasoning: str = "") -> Script:
    """Return a conversation of one question and its answer."""
    script = Script()
    script.context(special_tokens.BEGIN + special_tokens.USER)
    ask(script, question, answer, reasoning=reasoning)
    return script


def fitting(sample: Sample, room: int) -> Sample | None:
    """Return the sample, None where it is longer than `room` tokens."""
    return sample if len(sample) <= room else None
