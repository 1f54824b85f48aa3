"""What a request gives back, as values that cross processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How probable a token was.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural log-probability.
        rank: 1 for the most probable token, and so on; ties to the lower id.
        top: (token id, log-probability) of the most probable tokens, best first; the token itself may be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts: of the prompt, generated, and of the prompt taken from a cache, in all and by where they lay."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on the clock of one request: waiting for its first step, prefill, decode, and to the first token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What was computed for one request: see `headrace.engine.core.trace.RequestStep` for the fields' meaning."""

    layer_rows: int = 0
    producer_rows: int = 0
    index_scored: int = 0
    index_scored_by_layer: Mapping[int, int] = field(default_factory=dict)
    replayed_rows: int = 0
    reencoded_rows: int = 0
    preemptions: int = 0
    draft_rounds: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished request.

    Attributes:
        text: what was generated; a stop string is not part of it.
        token_ids: all generated tokens, the one that ended the answer included.
        logprobs: one entry per generated token, None if not asked for.
        finish_reason: "stop" (end of sequence, stop id or string, structure complete), "length", "cancelled" or
            "deadline".
        stop: the stop string or stop id that ended it, None if something else did.
        usage: token counts.
        seed: the seed that was used; with the same request it gives the same answer.
        token_logprobs: rank and alternatives of every generated token where alternatives were asked for.
        prompt_logprobs: one entry per prompt token, None for the first; None if not asked for.
        cache_reason: why no more of the prompt came from the prefix cache, None if there is nothing to explain.
        is_approximate: a window was rebuilt by bounded replay, or blocks of such a request were read (resume="replay").
        numerics: name of the numerics that computed it.
        timings, work: what it took.
        alternatives: the other answers where n > 1 was asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    usage: Usage
    seed: int
    stop: str | int | None = None
    token_logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    cache_reason: str | None = None
    is_approximate: bool = False
    numerics: str = ""
    timings: Timings = field(default_factory=Timings)
    work: Work = field(default_factory=Work)
    alternatives: tuple["Result", ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of a stream that is now certain, and the token it came with; `result` is there at the end.

    `index` is the prompt's place in the call, `choice` the answer's number where n > 1. The last piece of a request
    that ended without a new token has `token_id` None.
    """

    index: int
    text: str
    token_id: int | None
    result: Result | None = None
    choice: int = 0
