"""What a step tells those who wait, as values that cross processes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.result import Result

if TYPE_CHECKING:
    from headrace.engine.core.xray import StepXray


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """A token of an answer and the text that is now certain; `result` with the last one.

    `token_id` is None where an answer ended from outside. `logprob` and `top_logprobs`, (token id, log-probability)
    each, are there where they were asked for. `xray` is there where the request asked for it and the token
    was sampled in this step.
    """

    request_id: str
    choice: int
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    result: Result | None = None
    xray: "StepXray | None" = None
    is_draft: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    """How many tokens of a prompt were read or found so far; `xray` where the request asked for it."""

    request_id: str
    tokens: int
    xray: "StepXray | None" = None


@dataclass(frozen=True, kw_only=True)
class ErrorEvent:
    """A request failed, with all its answers. `kind` is the error's class: see `to_error`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


Event = TokenEvent | PrefillEvent | ErrorEvent
