"""Small skills on letters and digits, asked in the chat format: copying, addition, sorting, reversing.

Letters stand apart by blanks and digits are single tokens, so every symbol is one token whatever the vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.text.bpe import Encoder
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.data.tasks.task import fitting, single_question

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyTask:
    """Repeat a random string of letters.

    Attributes:
        min_letters, max_letters: length of the string, uniform.
    """

    encoder: Encoder
    name: str = "copy"
    min_letters: int = 4
    max_letters: int = 32

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return "Copy: q x a" with the answer "q x a"."""
        count = draws.between(self.min_letters, self.max_letters)
        text = " ".join(LETTERS[letter] for letter in draws.integers(len(LETTERS), count))
        return fitting(single_question(f"Copy: {text}", text).sample(self.encoder, self.name), room)


@dataclass(frozen=True, kw_only=True, eq=False)
class AdditionTask:
    """Add two numbers of equally many digits.

    Attributes:
        min_digits, max_digits: digits of each number, uniform; the first is not 0.
        has_scratch: the answer is reasoned out first, from the last digit on: "digit carry" per place.
    """

    encoder: Encoder
    name: str = "addition"
    min_digits: int = 2
    max_digits: int = 8
    has_scratch: bool = False

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return "58+67" with the answer "125", and the reasoning "5 1,2 1" where there is a scratch section."""
        digits = draws.between(self.min_digits, self.max_digits)
        left, right = (self._number(draws, digits) for _ in range(2))
        reasoning = self._scratch(left, right) if self.has_scratch else ""
        script = single_question(f"{left}+{right}", str(left + right), reasoning)
        return fitting(script.sample(self.encoder, self.name), room)

    @staticmethod
    def _number(draws: Draws, digits: int) -> int:
        values = draws.integers(10, digits).tolist()
        values[0] = draws.between(1, 9)
        return int("".join(map(str, values)))

    @staticmethod
    def _scratch(left: int, right: int) -> str:
        steps, carry = [], 0
        for left_digit, right_digit in zip(reversed(str(left)), reversed(str(right)), strict=True):
            carry, digit = divmod(int(left_digit) + int(right_digit) + carry, 10)
            steps.append(f"{digit} {carry}")
        return ",".join(steps)


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitTask:
    """Put random digits into ascending or reversed order.

    Attributes:
        order: which.
        min_digits, max_digits: how many, uniform.
    """

    encoder: Encoder
    order: Literal["sort", "reverse"]
    min_digits: int = 4
    max_digits: int = 16

    @property
    def name(self) -> str:
        """`order` with "digits_" in front."""
        return f"digits_{self.order}"

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return "Sort: 3911" with the answer "1139", or "Reverse: 3911" with "1193"."""
        digits = draws.integers(10, draws.between(self.min_digits, self.max_digits)).tolist()
        answer = sorted(digits) if self.order == "sort" else digits[::-1]
        question = f"{self.order.capitalize()}: {''.join(map(str, digits))}"
        return fitting(single_question(question, "".join(map(str, answer))).sample(self.encoder, self.name), room)
