"""What sampling remembers of one sequence: its seed and position, the tokens that came, where its structure stands."""

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import InternalError, UserError
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.seed import fork_seed
from headrace.engine.sampling.structured import Matcher

_FIRST_ROOM = 64


class TokenCounts:
    """Owns how often each token came, in the order in which they came first; adding one takes constant time."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Count some tokens."""
        unique, counts = np.unique(np.fromiter(ids, dtype=np.int64), return_counts=True)
        self._size = len(unique)
        self._places = {int(token_id): place for place, token_id in enumerate(unique)}
        self._ids: NDArray[np.int64] = unique
        self._counts: NDArray[np.float32] = counts.astype(np.float32)

    @property
    def ids(self) -> Tensor:
        """The tokens that came, [C] int64."""
        return torch.from_numpy(self._ids[: self._size])

    @property
    def counts(self) -> Tensor:
        """How often each of `ids` came, [C] float32 (exact up to 2**24)."""
        return torch.from_numpy(self._counts[: self._size])

    def add(self, token_id: int) -> None:
        """Count one more token."""
        place = self._places.get(token_id)
        if place is None:
            if self._size == len(self._ids):
                room = max(_FIRST_ROOM, self._size)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            place = self._places[token_id] = self._size
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def copy(self) -> "TokenCounts":
        """Return an independent copy."""
        other = copy(self)
        other._places, other._ids, other._counts = dict(self._places), self._ids.copy(), self._counts.copy()
        return other


class SamplerState:
    """Owns what sampling remembers of one sequence.

    Attributes:
        params: what the request asked for.
        seed: fixes, with `position`, the randomness of the next token.
        position: of the next token in its sequence, the prompt included.
        num_generated: tokens accepted so far.
        end_ids: tokens that end the answer: the stop ids and, unless ignored, end of sequence.
        generated: counts of the answer's tokens, None where no penalty needs them.
        seen: counts of the prompt's and the answer's tokens, None where no penalty needs them.
        matcher: where the structure stands, None for free text.
        bias: (ids [C] int64, bias [C] float32), None without.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | NDArray[np.int64],
        *,
        seed: int,
        eos_token_id: int,
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        """Stand at the end of a prompt.

        Args:
            params: what the request asks for.
            prompt_ids: the prompt, [N] ids.
            seed: the request's seed; `params.seed` where that is given.
            eos_token_id: end of sequence.
            vocab_size: ids that can be sampled are below it.
            matcher: a fresh one of the compiled `params.structured`.

        Raises:
            UserError: a bias or stop id is not in the vocabulary.
        """
        if (matcher is None) != (params.structured is None):
            raise InternalError("a sampler state has a structure without a matcher, or a matcher without a structure")
        _check_ids("logit_bias", (token_id for token_id, _ in params.bias_pairs), vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self.params, self.seed, self.matcher = params, seed, matcher
        self.position, self.num_generated = len(prompt_ids), 0
        self.eos_token_id = eos_token_id
        own_end = () if params.ignore_eos else (eos_token_id,)
        self.end_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own_end)))
        counts_answer = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.generated = TokenCounts() if counts_answer else None
        self.seen = TokenCounts(int(token_id) for token_id in prompt_ids) if params.repetition_penalty != 1 else None
        self.bias = _bias(params)

    @property
    def is_plain(self) -> bool:
        """Whether the next token is simply the largest logit."""
        return self.params.temperature == 0 and not self.is_adjusted

    @property
    def is_adjusted(self) -> bool:
        """Whether anything changes the logits before temperature."""
        has_extras = (self.bias, self.generated, self.seen, self.matcher) != (None, None, None, None)
        return has_extras or self.needs_more

    @property
    def needs_more(self) -> bool:
        """Whether the answer is still too short to end."""
        return self.num_generated < self.params.min_tokens

    def accept(self, token_id: int) -> bool:
        """Take the next token and return whether it ends the answer: end of sequence, a stop id, nothing can follow.

        Raises:
            InternalError: the structure does not allow the token.
            UserError: the structure became too complex to follow.

        State: advances position, counts and structure.
        """
        is_end = token_id in self.end_ids
        # a stop id may be a token the structure knows nothing of; end of sequence it does know
        if self.matcher is not None and (not is_end or token_id == self.eos_token_id):
            self.matcher.accept(token_id)
        self.position += 1
        self.num_generated += 1
        for counts in (self.generated, self.seen):
            if counts is not None:
                counts.add(token_id)
        return is_end or (self.matcher is not None and self.matcher.is_done)

    def copy(self) -> "SamplerState":
        """Return an independent copy with the same seed."""
        other = copy(self)
        other.generated = self.generated.copy() if self.generated is not None else None
        other.seen = self.seen.copy() if self.seen is not None else None
        other.matcher = self.matcher.copy() if self.matcher is not None else None
        return other

    def fork(self, index: int) -> "SamplerState":
        """Return the state of answer `index` of several: a copy with a seed derived from this one's; 0 keeps it."""
        other = self.copy()
        other.seed = fork_seed(self.seed, index)
        return other


def _bias(params: SamplingParams) -> tuple[Tensor, Tensor] | None:
    if not params.bias_pairs:
        return None
    ids, values = zip(*params.bias_pairs, strict=True)
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise UserError(f"{name} names token {token_id}; accepted are ids 0 to {vocab_size - 1}", param=name)
