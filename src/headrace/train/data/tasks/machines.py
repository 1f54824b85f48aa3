"""State tracking: closing open brackets, and the final state of a small machine that counts modulo a number."""

from dataclasses import dataclass

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.data.tasks.task import fitting, single_question

OPENING, CLOSING = "([{<", ")]}>"


@dataclass(frozen=True, kw_only=True, eq=False)
class BracketTask:
    """Close all brackets that a random string leaves open.

    Attributes:
        num_steps: brackets of the question, at least 1.
        max_depth: most brackets open at a time, at least 2.
    """

    encoder: Encoder
    name: str = "brackets"
    num_steps: int = 24
    max_depth: int = 6

    def __post_init__(self) -> None:
        """Refuse questions without a bracket to close.

        Raises:
            UserError: a number is out of range.
        """
        if self.num_steps < 1 or self.max_depth < 2:
            raise UserError(
                f"{self.num_steps} brackets at most {self.max_depth} deep are asked for; accepted are at least 1 "
                "bracket and a depth of at least 2"
            )

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return "Close: ( [ ] {" with the answer "} )"; at least one bracket is left open."""
        text, stack = [], [draws.integer(len(OPENING))]
        text.append(OPENING[stack[0]])
        for step in range(1, self.num_steps):
            # the last bracket opens one where none would be left open
            may_close = len(stack) > 1 or (bool(stack) and step + 1 < self.num_steps)
            must_close = len(stack) == self.max_depth and may_close
            if must_close or (may_close and draws.is_below(0.5)):
                text.append(CLOSING[stack.pop()])
            else:
                stack.append(draws.integer(len(OPENING)))
                text.append(OPENING[stack[-1]])
        answer = " ".join(CLOSING[kind] for kind in reversed(stack))
        script = single_question(f"Close: {' '.join(text)}", answer)
        return fitting(script.sample(self.encoder, self.name), room)


@dataclass(frozen=True, kw_only=True, eq=False)
class MachineTask:
    """Run a machine with one counter x, 0 at the start: a adds 1, b doubles, c negates, all modulo `modulus`.

    The order of the steps matters, so the answer needs the whole string in order.

    Attributes:
        modulus: 2 to 10, so that a state is one digit.
        num_steps: letters of the question.
    """

    encoder: Encoder
    name: str = "machine"
    modulus: int = 7
    num_steps: int = 16

    def __post_init__(self) -> None:
        """Refuse states that are not one digit.

        Raises:
            UserError: the modulus is out of range.
        """
        if not 2 <= self.modulus <= 10:
            raise UserError(f"the machine counts modulo {self.modulus}; accepted are 2 to 10", param="modulus")

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return "Modulo 7: a a b c" with the answer "3"."""
        state, letters = 0, [draws.pick("abc") for _ in range(self.num_steps)]
        for letter in letters:
            state = {"a": state + 1, "b": 2 * state, "c": -state}[letter] % self.modulus
        script = single_question(f"Modulo {self.modulus}: {' '.join(letters)}", str(state))
        return fitting(script.sample(self.encoder, self.name), room)
