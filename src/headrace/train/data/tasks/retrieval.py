"""Questions about a line far back in a long prompt, in the chat format.

`puzzles.py` writes the lines; this module fills a prompt of a wanted length with them, places the lines that are asked
about (the needles) at wanted depths, and marks the answers.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.data.tasks.task import Script, ask

_BLOCKS_AT_ONCE = 64
_MAX_ATTEMPTS = 4


class Needle(NamedTuple):
    """Whole lines, or whole turns, and a question that only they answer."""

    text: str
    question: str
    answer: str


class Puzzle(NamedTuple):
    """What a prompt is made of.

    Attributes:
        opening: everything before the first block, from the begin token on.
        needles: in the order of the questions.
        block: makes filler of the needles' kind; it never answers a question.
        before_question: what leads from the last block to the first question.
    """

    opening: str
    needles: Sequence[Needle]
    block: Callable[[], str]
    before_question: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RetrievalTask:
    """Prompts as long as there is room, with questions at the end.

    Attributes:
        puzzle: (draws, number of questions) -> puzzle; one of `puzzles.py`.
        num_questions: questions of a prompt, at least 1.
        depth: lowest and highest place of a needle in the filler, 0 its start, 1 its end.
        min_distance: least number of tokens from the end of a needle to the first question.
        num_tokens: longest prompt; as long as there is room where None.
    """

    encoder: Encoder
    name: str
    puzzle: Callable[[Draws, int], Puzzle]
    num_questions: int = 1
    depth: tuple[float, float] = (0.0, 1.0)
    min_distance: int = 0
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse depths that are no part of a prompt.

        Raises:
            UserError: a number is out of range.
        """
        if not 0 <= self.depth[0] <= self.depth[1] <= 1:
            raise UserError(f"the depth of needles is {self.depth}; accepted are two numbers from 0 to 1", "depth")
        if self.num_questions < 1 or self.min_distance < 0:
            raise UserError("a retrieval prompt needs at least one question and a distance of 0 tokens or more")

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a prompt with its answers; None where `room` leaves no place for the questions at their distance."""
        room = room if self.num_tokens is None else min(room, self.num_tokens)
        puzzle = self.puzzle(draws, self.num_questions)
        shares = [
            self.depth[0] + (self.depth[1] - self.depth[0]) * share for share in draws.uniform(len(puzzle.needles))
        ]
        fixed = self._script(puzzle, [], [(0, needle) for needle in puzzle.needles]).sample(self.encoder, self.name)
        budget = room - len(fixed)
        if budget < self.min_distance:
            return None
        blocks, sizes = self._blocks(puzzle, budget)
        for _ in range(_MAX_ATTEMPTS):
            count = bisect.bisect_right(sizes, budget)
            places = [self._place(share, sizes[:count]) for share in shares]
            if None in places:
                return None
            placed = list(zip([place for place in places if place is not None], puzzle.needles, strict=True))
            sample = self._script(puzzle, blocks[:count], placed).sample(self.encoder, self.name)
            if len(sample) <= room:
                return sample
            budget -= len(sample) - room  # pieces that join across blocks may come out longer than apart
        return None

    def _blocks(self, puzzle: Puzzle, budget: int) -> tuple[list[str], list[int]]:
        """Return filler blocks of more than `budget` tokens and the sums of their tokens up to each."""
        blocks: list[str] = []
        sizes: list[int] = [0]
        while sizes[-1] <= budget:
            new = [puzzle.block() for _ in range(_BLOCKS_AT_ONCE)]
            blocks += new
            lengths = [len(self.encoder.marked(block).ids) for block in new]
            sizes += list(accumulate(lengths, initial=sizes[-1]))[1:]
        return blocks, sizes[1:]

    def _place(self, share: float, sizes: Sequence[int]) -> int | None:
        """Return the number of blocks before a needle, None where no place is far enough from the questions."""
        total = sizes[-1] if sizes else 0
        wanted = min(int(share * total), total - self.min_distance)
        return bisect.bisect_right(sizes, wanted) if wanted >= 0 else None

    def _script(self, puzzle: Puzzle, blocks: Sequence[str], placed: Sequence[tuple[int, Needle]]) -> Script:
        script = Script()
        script.context(puzzle.opening)
        stops: dict[str, int] = {}
        done = 0
        for place, needle in sorted(placed, key=lambda item: item[0]):
            script.context("".join(blocks[done:place]))
            script.context(needle.text)
            stops[needle.question] = len(script)
            done = place
        script.context("".join(blocks[done:]))
        lead = puzzle.before_question
        for _, needle in placed:
            ask(script, lead + needle.question, needle.answer, clue_stop=stops[needle.question])
            lead = special_tokens.USER
        return script
