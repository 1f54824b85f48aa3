"""What a drafter guesses for one sequence. The value every drafter makes and every acceptance rule reads."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.core.errors import InternalError


@dataclass(frozen=True, eq=False)
class Proposal:
    """Guesses for the positions behind the newest token of one sequence, L of them; L may be 0.

    Attributes:
        drafter: who guessed, as metrics and traces name it.
        token_ids: the guesses, [L].
        probabilities: [L, V] float32; row k is exactly the distribution that guess k was drawn from, with the guesses
            before it given. None where the guesses were not drawn: each is the only one that could have come.
        confidences: [L] raw logits of a confidence head (sigmoid: chance that guess k is kept if all before it are);
            None from a drafter that has none.
        match_tokens: how many tokens a look-up matched; None from other drafters.
        chances: [L] chance that guess k and all before it are kept, as the scheduler of verify lengths took it; None
            before it did.
        num_made: how many guesses there were before `cut`.
    """

    drafter: str
    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = field(default=None, repr=False)
    confidences: tuple[float, ...] | None = None
    match_tokens: int | None = None
    chances: tuple[float, ...] | None = None
    num_made: int = 0

    def __post_init__(self) -> None:
        """Check that the parts belong together.

        Raises:
            InternalError: a drafter made parts of different lengths, or probabilities that are none.
        """
        count = len(self.token_ids)
        object.__setattr__(self, "num_made", max(count, self.num_made))
        if self.confidences is not None and len(self.confidences) != count:
            raise InternalError(f"drafter {self.drafter} made {count} guesses and {len(self.confidences)} confidences")
        if self.probabilities is None:
            return
        if self.probabilities.dim() != 2 or len(self.probabilities) != count:
            raise InternalError(
                f"drafter {self.drafter} made {count} guesses and probabilities {list(self.probabilities.shape)}"
            )
        drawn = self.probabilities[torch.arange(count), torch.tensor(self.token_ids, dtype=torch.int64)]
        if not bool((drawn > 0).all()):  # also false for NaN
            raise InternalError(f"drafter {self.drafter} made a guess that its own probabilities say cannot come")

    def __len__(self) -> int:
        """Return the number of guesses."""
        return len(self.token_ids)

    def cut(self, count: int) -> "Proposal":
        """Return the first `count` guesses, or all where there are no more.

        The answers' distribution stays exact under every rule only if `count` was decided without looking at guess
        `count` or any behind it; see `verify_length`.
        """
        if count >= len(self):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:count],
            probabilities=None if self.probabilities is None else self.probabilities[:count],
            confidences=None if self.confidences is None else self.confidences[:count],
            chances=None if self.chances is None else self.chances[:count],
        )
