"""Prompt look-up: guess that the text goes on as it did after the same words before. Needs no weights.

For every sequence an index says where each run of `min_match` to `max_match` tokens last ended. The longest run that
the text now ends with wins, of several places the newest, and what followed there is the guess. Where that reaches the
end of the text it goes on with the guess itself, so a text that repeats itself is continued without end.
"""

from collections.abc import Iterable, Sequence

from headrace.core.errors import InternalError
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.drafting.proposal import Proposal

ENTRY_BYTES = 256
"""Bytes of one entry of an index, its key included: an upper bound for runs of up to eight tokens."""


class LookupIndex:
    """Where runs of tokens last ended in the newest `capacity` tokens of one sequence; grows token by token.

    Owns the tokens and at most `capacity` entries for each length of run.
    """

    def __init__(self, *, min_match: int, max_match: int, capacity: int) -> None:
        self._sizes = range(max_match, min_match - 1, -1)
        self._capacity = capacity
        self._ids: list[int] = []
        self._dropped = 0  # tokens that were forgotten at the beginning
        self._ends: dict[tuple[int, ...], int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that came, forgotten ones included."""
        return self._dropped + len(self._ids)

    @property
    def num_entries(self) -> int:
        """Runs that can be found."""
        return len(self._ends)

    def add(self, token_ids: Iterable[int]) -> None:
        """Take tokens at the end."""
        for token_id in token_ids:
            # a run can be found once something has followed it
            for size in self._sizes:
                if size <= len(self._ids):
                    self._ends[tuple(self._ids[-size:])] = self.num_tokens
            self._ids.append(int(token_id))
            if len(self._ids) >= 2 * self._capacity:
                self._forget()

    def _forget(self) -> None:
        """Keep the newest `capacity` tokens, and the runs that lie in them."""
        excess = len(self._ids) - self._capacity
        self._ids = self._ids[excess:]
        self._dropped += excess
        self._ends = {run: end for run, end in self._ends.items() if end - len(run) >= self._dropped}

    def follow(self, token_id: int, count: int) -> tuple[list[int], int]:
        """Return what may follow the text and one more token: up to `count` ids, and how many tokens matched.

        Nothing older than the newest `capacity` tokens is read, the one more included.
        """
        text = [*self._ids[-(self._capacity - 1) :], token_id]
        start = self.num_tokens + 1 - len(text)
        for size in self._sizes:
            if size > len(text):
                continue
            run = text[-size:]
            # a run that the one more token follows is the newest of all, and not in the index yet
            end = self.num_tokens if text[-size - 1 : -1] == run else self._ends.get(tuple(run))
            if end is not None and end - size >= start:
                for _ in range(count):
                    text.append(text[end - start])
                    end += 1
                return text[-count:], size
        return [], 0


class LookupDrafter:
    """A drafter that looks up what followed the same tokens before, for any number of sequences.

    Args:
        max_guesses: tokens per proposal.
        min_match: tokens that must be the same, at least.
        max_match: tokens that are compared, at most.
        capacity: newest tokens of a sequence that are looked at; between cleanings twice as many are kept.
    """

    name = "lookup"
    wants_taps = False

    def __init__(self, max_guesses: int = 5, *, min_match: int = 2, max_match: int = 5, capacity: int = 4096) -> None:
        if not (max_guesses >= 1 and 1 <= min_match <= max_match < capacity):
            raise InternalError(
                f"a look-up of {max_guesses} guesses, matches of {min_match} to {max_match} and {capacity} tokens was "
                "asked for; 1 or more guesses and 1 <= min_match <= max_match < capacity are accepted"
            )
        self.max_guesses = max_guesses
        self._shape = {"min_match": min_match, "max_match": max_match, "capacity": capacity}
        self._indices: dict[str, LookupIndex] = {}
        self.bytes_per_sequence = 2 * capacity * ((max_match - min_match + 1) * ENTRY_BYTES + 8)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Remember tokens; see `Drafter.observe`.

        Raises:
            InternalError: a position is left out or comes twice.
        """
        for one in committed:
            index = self._indices.get(one.name)
            if index is None:
                index = self._indices[one.name] = LookupIndex(**self._shape)
            if one.first != index.num_tokens:
                raise InternalError(f"position {one.first} of {one.name} was observed after {index.num_tokens} tokens")
            index.add(one.token_ids.tolist())

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Return what followed before; nothing for sequences that were never observed or match nothing."""
        return [self._one(one) for one in wanted]

    def _one(self, wanted: Wanted) -> Proposal:
        index = self._indices.get(wanted.name)
        if index is None:
            return Proposal(self.name)
        ids, size = index.follow(wanted.token_id, min(wanted.count, self.max_guesses))
        return Proposal(self.name, tuple(ids), match_tokens=size or None)

    def forget(self, names: Iterable[str]) -> None:
        """Let go of sequences."""
        for name in names:
            self._indices.pop(name, None)
