"""Text without meaning whose best possible loss is known: a Markov chain over symbols.

From every symbol the same probabilities lead to different successors, so the entropy of the next symbol is one number,
whatever came before; a draft's best acceptance rate is known as well.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Ids, Sample, next_token_labels


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovTask:
    """A chain of order 1. Its transitions are a function of `chain_seed`, the same in every row.

    Attributes:
        symbol_ids: [symbols] the ids it is made of.
        probabilities: of the successors of each symbol; they sum to 1.
        num_tokens: length of a sample, at least 2.
    """

    symbol_ids: Ids
    probabilities: tuple[float, ...] = (0.5, 0.25, 0.125, 0.125)
    num_tokens: int = 128
    chain_seed: int = 0
    name: str = "markov"

    def __post_init__(self) -> None:
        """Refuse what is no chain.

        Raises:
            UserError: probabilities that do not sum to 1, or more successors than symbols.
        """
        if min(self.probabilities, default=0) <= 0 or abs(sum(self.probabilities) - 1) > 1e-9:
            raise UserError(f"the chain's probabilities {self.probabilities} must be positive and sum to 1")
        if len(self.probabilities) > len(self.symbol_ids) or self.num_tokens < 2:
            raise UserError(
                f"{len(self.probabilities)} successors and {self.num_tokens} tokens are asked for; accepted are at "
                f"most {len(self.symbol_ids)} successors (one per symbol) and at least 2 tokens"
            )

    @property
    def entropy(self) -> float:
        """Nats per predicted token that no model can go below."""
        return float(-sum(p * np.log(p) for p in self.probabilities))

    @cached_property
    def successors(self) -> NDArray[np.int64]:
        """[symbols, probabilities] the symbol each probability leads to; all of a row differ."""
        draws = Draws(self.chain_seed, "markov", len(self.symbol_ids))
        count = len(self.symbol_ids)
        return np.stack([draws.distinct(count, len(self.probabilities)) for _ in range(count)])

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a stretch of the chain from a random symbol; every token but the first is a label."""
        if self.num_tokens > room:
            return None
        bounds = np.cumsum(self.probabilities)[:-1]
        choices = np.searchsorted(bounds, draws.uniform(self.num_tokens - 1), side="right").tolist()
        successors = self.successors.tolist()
        symbols = [draws.integer(len(self.symbol_ids))]
        for choice in choices:
            symbols.append(successors[symbols[-1]][choice])
        token_ids = self.symbol_ids[np.array(symbols)].astype(np.int64)
        return Sample(token_ids=token_ids, labels=next_token_labels(token_ids), kind=self.name)
