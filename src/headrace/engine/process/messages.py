"""What crosses between front and engine process, as picklable values, and errors as such values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.core.errors import (
    CapacityError,
    CheckpointError,
    EngineError,
    HeadraceError,
    InternalError,
    OverloadedError,
    UserError,
)
from headrace.engine.core.events import ErrorEvent, Event
from headrace.engine.core.options import EngineOptions
from headrace.engine.submission import Submission

if TYPE_CHECKING:
    from headrace.models.deepseek_v41.load import LoadOptions


Question = Literal["status", "totals", "traces", "audit", "clear", "clear disk"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message to the process."""

    path: Path
    options: EngineOptions
    load: "LoadOptions | None" = None


@dataclass(frozen=True)
class Cancel:
    """End a request."""

    request_id: str


@dataclass(frozen=True)
class Query:
    """Ask about the engine: `token` comes back with the answer."""

    token: int
    what: Question


@dataclass(frozen=True)
class Progress:
    """Bytes read since the last one, while loading."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine can take requests. `memory` are the bytes of its plan by purpose, `total` included."""

    numerics: str
    max_context: int
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a `Query` asked for."""

    token: int
    value: Any


@dataclass(frozen=True)
class Failed:
    """The engine could not start, or cannot go on."""

    kind: str
    message: str
    param: str | None


ToEngine = Setup | Submission | Cancel | Query
FromEngine = Progress | Ready | Answer | Failed | list[Event]

_KINDS: dict[str, type[HeadraceError]] = {
    kind.__name__: kind
    for kind in (UserError, CapacityError, CheckpointError, OverloadedError, InternalError, EngineError)
}


def to_error(told: ErrorEvent | Failed) -> HeadraceError:
    """Return the error that was told, as one to raise."""
    return _KINDS.get(told.kind, InternalError)(told.message, told.param)
