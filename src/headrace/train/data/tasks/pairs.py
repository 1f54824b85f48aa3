"""The probe for far context: fused pairs, each one token that holds a key and a value, and queries long after them.

A query can be answered by finding one token, so one attention step suffices and a small model learns it in a minute;
and it cannot be answered without that token, so what does not reach it stays at chance. With several hops the value of
a pair is the key of the next.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.core.errors import UserError
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Answer, Ids, Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class PairVocabulary:
    """The ids of the probe: pair (k, v) is `first_pair_id + k * num_values + v`, then queries, then values.

    Attributes:
        num_keys, num_values: sizes; their product is the number of pair ids.
        num_hops: query ids exist for 1 to this many hops; more than 1 needs as many values as keys.
        first_pair_id: start of the block of `num_ids` ids that this vocabulary owns.
        noise_ids: [any length, at least 1] what stands between the pairs; none of the owned ids.
        is_noise_text: noise is a slice of `noise_ids`, e.g. of `TokenizedText.token_ids`, instead of single draws.
    """

    num_keys: int = 32
    num_values: int = 16
    num_hops: int = 1
    first_pair_id: int
    noise_ids: Ids
    is_noise_text: bool = False

    def __post_init__(self) -> None:
        """Refuse what no row could be made of.

        Raises:
            UserError: a size is out of range, or a noise id is one of the owned ids.
        """
        if min(self.num_keys, self.num_values, self.num_hops) < 1 or self.first_pair_id < 0:
            raise UserError("a pair vocabulary needs at least one key, one value and one hop, and ids from 0 on")
        if self.num_hops > 1 and self.num_values != self.num_keys:
            raise UserError(
                f"{self.num_hops} hops need as many values as keys; there are {self.num_values} values and "
                f"{self.num_keys} keys",
                param="num_values",
            )
        owned = (self.noise_ids >= self.first_pair_id) & (self.noise_ids < self.first_pair_id + self.num_ids)
        if not len(self.noise_ids) or owned.any():
            raise UserError("the noise of a pair vocabulary must be ids other than its own", param="noise_ids")

    @classmethod
    def alone(
        cls, *, num_keys: int = 32, num_values: int = 16, num_hops: int = 1, num_noise: int = 64
    ) -> "PairVocabulary":
        """Return the vocabulary of a probe-only model: id 0 for padding, the owned ids, then noise; see `size`."""
        owned = num_keys * num_values + num_hops * num_keys + num_values
        return cls(
            num_keys=num_keys,
            num_values=num_values,
            num_hops=num_hops,
            first_pair_id=1,
            noise_ids=np.arange(1 + owned, 1 + owned + num_noise),
        )

    @property
    def num_ids(self) -> int:
        """How many ids it owns, all in a row from `first_pair_id`, e.g. reserved ids of a trained vocabulary."""
        return self.num_keys * self.num_values + self.num_hops * self.num_keys + self.num_values

    @property
    def size(self) -> int:
        """Number of ids a model needs that reads these rows and nothing else."""
        return max(self.first_pair_id + self.num_ids, int(self.noise_ids.max()) + 1)

    def pair_ids(self, keys: Ids, values: Ids) -> Ids:
        """Return the ids of pairs."""
        return self.first_pair_id + keys * self.num_values + values

    def query_ids(self, keys: Ids, hops: int) -> Ids:
        """Return the ids that ask what lies `hops` hops behind a key."""
        return self.first_pair_id + self.num_keys * self.num_values + (hops - 1) * self.num_keys + keys

    def value_ids(self, values: Ids) -> Ids:
        """Return the ids of answers."""
        return self.first_pair_id + self.num_ids - self.num_values + values


class _Content(NamedTuple):
    """The pairs of a row, and its possible questions: key asked, value answered, indices [questions, hops] of pairs."""

    keys: Ids
    values: Ids
    asked: Ids
    answers: Ids
    used: Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class PairTask:
    """Rows of noise with pairs in it, and a block of queries at the end; the queried value is the label.

    Keys of a row differ. Values and questions are used equally often, so guessing from the values of a row is right
    no more often than 1 in `min(num_pairs, num_values)` (with several hops: 1 in the number of questions).

    Attributes:
        name: see `Task`.
        vocabulary: the ids.
        num_pairs: pairs of a row; with several hops, rounded down to whole chains of `hops` + 1 pairs.
        num_queries: queries at the end of a row.
        hops: pairs to follow for an answer.
        min_distance, max_distance: bounds for the tokens from a pair to any query; no upper bound where None.
        num_tokens: length of a row; as long as there is room where None.
        begin_id: id that stands before everything, e.g. the begin token; none where None.
    """

    vocabulary: PairVocabulary
    name: str = "pairs"
    num_pairs: int = 16
    num_queries: int = 48
    hops: int = 1
    min_distance: int = 1
    max_distance: int | None = None
    num_tokens: int | None = None
    begin_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be asked.

        Raises:
            UserError: a number is out of range for this vocabulary.
        """
        vocabulary = self.vocabulary
        if not 1 <= self.hops <= vocabulary.num_hops:
            raise UserError(f"{self.hops} hops are asked for; the vocabulary has 1 to {vocabulary.num_hops}", "hops")
        links = 1 if self.hops == 1 else self.hops + 1
        needed = self.num_pairs if self.hops == 1 else self.num_pairs // links * (links + 1)
        if self.num_pairs < links or needed > vocabulary.num_keys:
            raise UserError(
                f"{self.num_pairs} pairs with {self.hops} hops need {needed} different keys and at least {links} "
                f"pairs; the vocabulary has {vocabulary.num_keys} keys",
                param="num_pairs",
            )
        if self.num_queries < 1 or self.min_distance < 1:
            raise UserError("a row of pairs needs at least one query and a distance of at least 1 token")

    def make(self, draws: Draws, room: int) -> Sample | None:
        """Return a row; None where `room` or the distances leave too few places for the pairs."""
        total = room if self.num_tokens is None else self.num_tokens
        lead = 0 if self.begin_id is None else 1
        first_query = total - self.num_queries
        first = lead if self.max_distance is None else max(lead, total - 1 - self.max_distance)
        content = self._chains(draws) if self.hops > 1 else self._singles(draws)
        num_places = first_query - self.min_distance - first + 1
        if total > room or num_places < len(content.keys):
            return None
        places = first + draws.distinct(num_places, len(content.keys))
        token_ids = self._noise(draws, total)
        if self.begin_id is not None:
            token_ids[0] = self.begin_id
        token_ids[places] = self.vocabulary.pair_ids(content.keys, content.values)
        asked = _equally_often(draws, len(content.asked), self.num_queries)
        token_ids[first_query:] = self.vocabulary.query_ids(content.asked[asked], self.hops)
        labels = np.full(total, IGNORE, dtype=np.int64)
        labels[first_query:] = self.vocabulary.value_ids(content.answers[asked])
        clues = places[content.used[asked]].max(axis=1)  # the nearest of the pairs a query needs
        starts = np.arange(first_query, total)
        answers = tuple(
            Answer(start, 1, distance)
            for start, distance in zip(starts.tolist(), (starts - clues).tolist(), strict=True)
        )
        return Sample(token_ids=token_ids, labels=labels, kind=self.name, answers=answers)

    def _singles(self, draws: Draws) -> _Content:
        keys = draws.distinct(self.vocabulary.num_keys, self.num_pairs)
        values = _equally_often(draws, self.vocabulary.num_values, self.num_pairs)
        return _Content(keys, values, keys, values, np.arange(self.num_pairs)[:, None])

    def _chains(self, draws: Draws) -> _Content:
        """Chains of hops + 1 pairs over different keys; every stretch of `hops` pairs is a question."""
        links = self.hops + 1
        num_chains = self.num_pairs // links
        nodes = draws.distinct(self.vocabulary.num_keys, num_chains * (links + 1)).reshape(num_chains, links + 1)
        pairs = np.arange(num_chains * links).reshape(num_chains, links)
        used = np.concatenate([pairs[:, start : start + self.hops] for start in range(links - self.hops + 1)])
        asked = np.concatenate([nodes[:, start] for start in range(links - self.hops + 1)])
        ends = np.concatenate([nodes[:, start + self.hops] for start in range(links - self.hops + 1)])
        return _Content(nodes[:, :-1].reshape(-1), nodes[:, 1:].reshape(-1), asked, ends, used)

    def _noise(self, draws: Draws, count: int) -> Ids:
        noise = self.vocabulary.noise_ids
        if not self.vocabulary.is_noise_text:
            return noise[draws.integers(len(noise), count)].astype(np.int64)
        first = draws.integer(len(noise))
        return np.take(noise, np.arange(first, first + count), mode="wrap").astype(np.int64)


def _equally_often(draws: Draws, limit: int, count: int) -> Ids:
    """Return [count] integers below `limit` in random order, each as often as any other, give or take one."""
    rounds = [draws.permutation(limit) for _ in range(-(-count // limit))]
    return np.concatenate(rounds)[:count][draws.permutation(count)]
