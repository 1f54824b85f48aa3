"""Made-up facts with controlled frequency: what a model knows by heart, as a function of how often it saw it.

A fact is a sentence that nothing else tells; which facts there are is a function of `facts_seed` alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Sample
from headrace.train.data.tasks.task import Script, fitting

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_RELATIONS = ("capital", "river", "founder", "color", "symbol", "guild")


class Fact(NamedTuple):
    """A sentence up to its value, and the value."""

    sentence: str
    value: str


@dataclass(frozen=True, kw_only=True, eq=False)
class FactTask:
    """One fact per sample, the whole sentence to be learned and its value judged.

    Attributes:
        num_facts: how many there are.
        weights: relative frequencies; fact i has `weights[i % len(weights)]`.
        facts_seed: which facts there are.
    """

    encoder: Encoder
    num_facts: int = 2000
    weights: tuple[int, ...] = (1, 4, 16)
    facts_seed: int = 0
    name: str = "facts"

    def __post_init__(self) -> None:
        """Refuse an empty set.

        Raises:
            UserError: there is no fact, or a weight is below 1.
        """
        if self.num_facts < 1 or min(self.weights, default=0) < 1:
            raise UserError("facts need at least one fact and weights of at least 1")

    def fact(self, index: int) -> Fact:
        """Return a fact, e.g. ("The river of Tobavu is", " Lenodi")."""
        draws = Draws(self.facts_seed, "fact", index)
        entity, value = _name(draws), _name(draws)
        return Fact(f"The {draws.pick(_RELATIONS)} of {entity} is", f" {value}")

    def sample(self, index: int) -> Sample:
        """Return a fact as a document, e.g. to ask for each of them once."""
        sentence, value = self.fact(index)
        script = Script()
        script.context(special_tokens.BEGIN)
        script.learned(sentence)
        script.answer(value)
        script.learned(f".{special_tokens.END}")
        return script.sample(self.encoder, self.name)

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a fact, drawn by its weight."""
        slots = [kind for kind, weight in enumerate(self.weights[: self.num_facts]) for _ in range(weight)]
        kind = draws.pick(slots)
        same_kind = range(kind, self.num_facts, len(self.weights))
        return fitting(self.sample(draws.pick(same_kind)), room)


def _name(draws: Draws) -> str:
    return "".join(draws.pick(_ONSETS) + draws.pick(_VOWELS) for _ in range(4)).capitalize()
