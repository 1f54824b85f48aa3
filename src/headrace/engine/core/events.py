"""What a step tells those who wait, as values that cross processes."""

from dataclasses import dataclass

from headrace.engine.result import Result


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """A token of an answer and the text that is now certain; `result` with the last one.

    `token_id` is None where an answer ended from outside.
    """

    request_id: str
    choice: int
    token_id: int | None
    text: str
    result: Result | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    """How many tokens of a prompt were read or found so far."""

    request_id: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ErrorEvent:
    """A request failed, with all its answers. `kind` is the error's class: see `to_error`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


Event = TokenEvent | PrefillEvent | ErrorEvent
