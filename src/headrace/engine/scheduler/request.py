"""What the scheduler is told about a request and about the part of its prompt that is already there."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import CapacityError, InternalError, UserError
from headrace.engine.scheduler.config import SchedulerConfig

Mode = Literal["replay", "full"]
Holders = frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it is submitted.

    Args:
        request_id: unique among the requests that have not ended.
        arrival: sequence number; a later request has a higher one.
        prompt_tokens: N, tokens of the prompt, from 1.
        max_new_tokens: most tokens of the answer; 0 reads the prompt only.
        priority: higher goes first.
        deadline: the request ends at the first step boundary at or after this time; same clock as `now`.
        mode: "full" runs the decoder on the whole prompt and never takes anything from the prefix cache.
        children: ids of further answers to the same prompt, which start when it has been read.
    """

    request_id: str
    arrival: int
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    deadline: float | None = None
    mode: Mode = "replay"
    children: tuple[str, ...] = ()

    @property
    def max_tokens_stored(self) -> int:
        """Tokens with rows in the pool at the end; the last token of an answer never becomes a row."""
        return self.prompt_tokens + max(self.max_new_tokens - 1, 0)


@dataclass(frozen=True, kw_only=True)
class Match:
    """What the prefix cache has for a prompt.

    Args:
        cached_tokens: c, length of the usable match; rows below it are never written.
        first_row: r, the first row to compute; at most c, and N - W or less unless it is 0.
        holders: the c // block_tokens matched blocks, counted by who holds them now; the empty set counts blocks that
            only the cache holds. See `count_holders`.
        waits_for: a request in prefill that is about to compute a longer match.
        wait_tokens: tokens that it must have computed for that.
        is_loading: more of the prompt is being read from lower tiers of the cache; ask again later.
    """

    cached_tokens: int = 0
    first_row: int = 0
    holders: tuple[tuple[Holders, int], ...] = ()
    waits_for: str | None = None
    wait_tokens: int = 0
    is_loading: bool = False


Matcher = Callable[[Request, tuple[str, ...]], Match]
"""Look a request up; the second argument names those that start in this same step, whose matched blocks count as held
by them."""


def count_holders(blocks: Sequence[int], tables: Mapping[str, Sequence[int]]) -> tuple[tuple[Holders, int], ...]:
    """Return `Match.holders` for matched block ids, [c // block_tokens], given the block tables of other requests.

    Block `i` of a match is held by the requests that have the same id at index `i` of their table.
    """
    counts: dict[Holders, int] = {}
    for index, block in enumerate(blocks):
        holders = frozenset(name for name, table in tables.items() if index < len(table) and table[index] == block)
        counts[holders] = counts.get(holders, 0) + 1
    return tuple(counts.items())


def check_request(request: Request, config: SchedulerConfig, taken: Container[str]) -> None:
    """Refuse what can never run; `taken` are the ids in use.

    Raises:
        UserError: an id is in use or a number is out of range.
        CapacityError: prompt and answer exceed the context, the pool or the slots.
    """
    ids = [request.request_id, *request.children]
    for name in ids:
        if name in taken or ids.count(name) > 1:
            raise UserError(f"request id {name!r} is in use; accepted is one that is not", param="request_id")
    if request.prompt_tokens < 1:
        raise UserError(f"the prompt has {request.prompt_tokens} tokens; at least one is needed", param="prompt")
    if request.max_new_tokens < 0:
        raise UserError(f"max_tokens is {request.max_new_tokens}; accepted is 0 or more", param="max_tokens")
    if request.mode not in {"replay", "full"}:
        raise UserError(f"mode is {request.mode!r}; accepted are 'replay' and 'full'", param="mode")
    total = request.prompt_tokens + request.max_new_tokens
    wanted = f"a prompt of {request.prompt_tokens} tokens and up to {request.max_new_tokens} new ones"
    if total > config.max_context:
        raise CapacityError(f"{wanted} make {total}; the context holds {config.max_context}", param="max_tokens")
    if len(ids) > config.num_slots:
        raise CapacityError(f"{len(ids)} answers at once need as many slots; there are {config.num_slots}", param="n")
    blocks = config.blocks_for(request.max_tokens_stored) + own_blocks(request, config) * len(request.children)
    if blocks > config.num_blocks:
        raise CapacityError(
            f"{wanted} in {len(ids)} answers need {blocks} blocks of {config.block_tokens} tokens; "
            f"the pool has {config.num_blocks}",
            param="max_tokens",
        )


def own_blocks(request: Request, config: SchedulerConfig) -> int:
    """Return how many blocks a further answer needs of its own when it starts: a copy of the open block, if any."""
    return 1 if request.prompt_tokens % config.block_tokens else 0


def check_match(match: Match, request: Request, config: SchedulerConfig) -> None:
    """Refuse a match that breaks the rules of exact resume.

    Raises:
        InternalError: a number does not fit the others.
    """
    blocks = sum(count for _, count in match.holders)
    latest = max(0, request.prompt_tokens - config.window)
    if not 0 <= match.first_row <= min(match.cached_tokens, latest) or match.cached_tokens > request.prompt_tokens:
        raise InternalError(
            f"request {request.request_id!r} of {request.prompt_tokens} tokens was matched for {match.cached_tokens} "
            f"and would start at row {match.first_row}; accepted is a start up to both {latest} and the match"
        )
    if blocks != match.cached_tokens // config.block_tokens:
        raise InternalError(
            f"request {request.request_id!r} was matched for {match.cached_tokens} tokens in {blocks} full blocks; "
            f"accepted are {match.cached_tokens // config.block_tokens}"
        )
