"""`SamplingParams`: everything a request may ask for. A value, checked when it is made, that can cross processes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import numpy as np

from headrace.core.errors import UserError
from headrace.engine.sampling.spec import Structured

SEED_LIMIT = 1 << 63
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
_MAX_BIAS_ENTRIES = 4096

LogitBias = Mapping[int, float] | Iterable[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, when it ends, and what is reported.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        min_tokens: no end (end-of-sequence token, stop id, stop string) before this many tokens, 0 .. `max_tokens`.
        temperature: 0 picks the most probable token; otherwise logits are divided by it.
        top_k: keep this many of the most probable tokens, at least 1; None keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens at least this fraction as probable as the most probable one, in [0, 1].
        repetition_penalty: positive logits of tokens of the prompt and the answer are divided by it, others multiplied;
            above 0, 1 changes nothing.
        presence_penalty: taken off the logit of every token of the answer, in [-2, 2].
        frequency_penalty: the same, once for every time the token came, in [-2, 2].
        logit_bias: added to logits by token id, in [-100, 100]; a mapping or pairs, kept as pairs in the order of ids.
        seed: 0 .. 2**63 - 1; None draws one, which the result reports.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer, as the end-of-sequence token does.
        n: answers to one prompt, 1 .. 128; the first is what n = 1 gives.
        logprobs: report the log-probability of every generated token (of the model, before temperature).
        top_logprobs: report this many alternatives beside each, 0 .. 20.
        prompt_logprobs: report the log-probability of the prompt's tokens and this many alternatives beside each, 0 ..
            20; None reports nothing. True is kept as 0, False as None. Needs the decoder on the whole prompt, so `mode`
            must not be "replay".
        ignore_eos: go on after the end-of-sequence token.
        structured: what the answer must look like, None if anything.
        priority: higher goes first.
        deadline_s: seconds from submission after which the request is given up, None for never.
        resume: "exact" or "replay" from cached prefixes; None is the engine's choice.
        mode: "full" or "replay" prefill; None is the engine's choice.
        cache_salt: cached prefixes are shared only between requests of the same salt.
        acceptance: how drafted tokens are judged where the temperature is above 0: "keyed" gives the answer that the
            seed gives without drafts; "block" keeps more of them, and the answer is another draw of the distribution,
            which a seed alone does not fix. Only requests that name it get it.
        xray: tell with every event what was computed and where attention read from (`headrace.engine.core.xray`).
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: bool = True
    top_logprobs: int = 0
    prompt_logprobs: bool | int | None = None
    ignore_eos: bool = False
    structured: Structured | None = None
    priority: int = 0
    deadline_s: float | None = None
    resume: Literal["exact", "replay"] | None = None
    mode: Literal["full", "replay"] | None = None
    cache_salt: str | None = None
    xray: bool = False
    acceptance: Literal["keyed", "block"] = "keyed"

    def __post_init__(self) -> None:
        """Check every value, and keep lists as tuples.

        Raises:
            UserError: a value is out of range, or two do not go together.
        """
        _check_lengths(self)
        _check_numbers(self)
        _check_choices(self)
        object.__setattr__(self, "prompt_logprobs", _prompt_alternatives(self.prompt_logprobs))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        _check_together(self)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """The logit bias as (token id, bias), in the order of ids."""
        return _bias_pairs(self.logit_bias)

    @property
    def num_prompt_alternatives(self) -> int | None:
        """Alternatives to report beside each prompt token; None where prompt log-probs are not asked for."""
        return _prompt_alternatives(self.prompt_logprobs)


def _check_lengths(params: SamplingParams) -> None:
    _whole("max_tokens", params.max_tokens, 1)
    _whole("min_tokens", params.min_tokens, 0)
    if params.min_tokens > params.max_tokens:
        raise UserError(
            f"min_tokens is {params.min_tokens}; accepted is at most max_tokens, here {params.max_tokens}",
            param="min_tokens",
        )
    _whole("n", params.n, 1, MAX_N)
    _whole("top_logprobs", params.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if params.prompt_logprobs is not None and not isinstance(params.prompt_logprobs, bool):
        _whole("prompt_logprobs", params.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    if params.top_k is not None:
        _whole("top_k", params.top_k, 1)
    if params.seed is not None:
        _whole("seed", params.seed, 0, SEED_LIMIT - 1)
    if not _is_whole(params.priority):
        raise UserError(f"priority is {params.priority!r}; accepted is a whole number", param="priority")


def _check_numbers(params: SamplingParams) -> None:
    _number("temperature", params.temperature, "0 or more", low=0)
    _number("top_p", params.top_p, "above 0 up to 1", above=0, high=1)
    _number("min_p", params.min_p, "0 up to 1", low=0, high=1)
    _number("repetition_penalty", params.repetition_penalty, "above 0", above=0)
    _number("presence_penalty", params.presence_penalty, "-2 up to 2", low=-2, high=2)
    _number("frequency_penalty", params.frequency_penalty, "-2 up to 2", low=-2, high=2)
    if params.deadline_s is not None:
        _number("deadline_s", params.deadline_s, "a number of seconds above 0", above=0)


def _check_choices(params: SamplingParams) -> None:
    for name in ("logprobs", "ignore_eos", "xray"):
        if not isinstance(getattr(params, name), bool):
            raise UserError(f"{name} is {getattr(params, name)!r}; accepted are True and False", param=name)
    for name, accepted in (("resume", ("exact", "replay")), ("mode", ("full", "replay"))):
        value = getattr(params, name)
        if value is not None and value not in accepted:
            raise UserError(f"{name} is {value!r}; accepted are {', '.join(map(repr, accepted))} and None", param=name)
    if params.acceptance not in ("keyed", "block"):
        raise UserError(f"acceptance is {params.acceptance!r}; accepted are 'keyed' and 'block'", param="acceptance")
    if params.structured is not None and not isinstance(params.structured, Structured):
        raise UserError(
            f"structured is a {type(params.structured).__name__}; accepted is a Structured or None", param="structured"
        )
    if params.cache_salt is not None and (not isinstance(params.cache_salt, str) or not params.cache_salt):
        raise UserError(
            f"cache_salt is {params.cache_salt!r}; accepted is text of one or more characters", param="cache_salt"
        )
    if params.cache_salt is not None and any("\ud800" <= letter <= "\udfff" for letter in params.cache_salt):
        raise UserError("cache_salt holds half a character; accepted is Unicode text", param="cache_salt")


def _check_together(params: SamplingParams) -> None:
    if params.top_logprobs and not params.logprobs:
        raise UserError(
            f"top_logprobs is {params.top_logprobs} and logprobs is False; accepted is 0 without logprobs",
            param="top_logprobs",
        )
    if params.num_prompt_alternatives is not None and params.mode == "replay":
        raise UserError(
            "prompt_logprobs needs the decoder on the whole prompt; accepted is mode 'full' or None, not 'replay'",
            param="prompt_logprobs",
        )
    if params.structured is not None and (params.min_tokens or params.ignore_eos):
        name = "min_tokens" if params.min_tokens else "ignore_eos"
        raise UserError(
            f"{name} cannot be given together with structured: the structure alone says where an answer may end",
            param=name,
        )


def _prompt_alternatives(value: bool | int | None) -> int | None:
    if isinstance(value, bool):
        return 0 if value else None
    return value


def _bias_pairs(bias: LogitBias) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(token_id, value) for token_id, value in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError) as error:
        raise UserError(
            "logit_bias is not understood; accepted is a mapping of token ids to numbers, or pairs of them",
            param="logit_bias",
        ) from error
    for token_id, value in pairs:
        _token_id("logit_bias", token_id)
        if not _is_finite(value) or not abs(value) <= MAX_BIAS:
            raise UserError(
                f"logit_bias of token {token_id} is {value!r}; accepted is -{MAX_BIAS:g} up to {MAX_BIAS:g}",
                param="logit_bias",
            )
    if len(pairs) > _MAX_BIAS_ENTRIES:
        raise UserError(
            f"logit_bias has {len(pairs)} entries; accepted are {_MAX_BIAS_ENTRIES} at most", param="logit_bias"
        )
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise UserError("logit_bias names a token more than once; accepted is one bias a token", param="logit_bias")
    return tuple(sorted((int(token_id), float(value)) for token_id, value in pairs))


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        raise UserError(f"stop is the single string {stop!r}; accepted is a list of strings", param="stop")
    if not isinstance(stop, Iterable):
        raise UserError(f"stop is {stop!r}; accepted is a list of strings", param="stop")
    stop = tuple(stop)
    for text in stop:
        if not isinstance(text, str):
            raise UserError(f"a stop string is {text!r}; accepted is text", param="stop")
        if not text:
            raise UserError("a stop string is empty; accepted is at least one character", param="stop")
    return stop


def _stop_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise UserError(f"stop_token_ids is {ids!r}; accepted is a list of token ids", param="stop_token_ids")
    found = list(ids)
    for token_id in found:
        _token_id("stop_token_ids", token_id)
    return tuple(dict.fromkeys(int(token_id) for token_id in found))


def _token_id(name: str, value: object) -> None:
    if not _is_whole(value) or value < 0:
        raise UserError(f"{name} names token {value!r}; accepted is a token id, a whole number from 0", param=name)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if not _is_whole(value) or value < low or (high is not None and value > high):
        limit = "" if high is None else f" to {high}"
        raise UserError(f"{name} is {value!r}; accepted is a whole number from {low}{limit}", param=name)


def _number(
    name: str,
    value: object,
    accepted: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
) -> None:
    if not _is_finite(value) or not low <= value <= high or value <= above:
        raise UserError(f"{name} is {value!r}; accepted is {accepted}", param=name)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_finite(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float | np.floating | np.integer)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
