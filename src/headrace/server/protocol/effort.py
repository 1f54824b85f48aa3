"""Reasoning effort: names as the encoding knows them, and whole numbers, which it prints but does not take.

A number is rendered as `high` and then replaced in the effort line: the one place where a prompt is not what the
encoding package renders.
"""

from dataclasses import dataclass

from headrace.core.errors import UserError
from headrace.server.protocol.segments import Segment

NAMES: dict[str, int | None] = {
    "none": None,
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "ultra": 100,
    "max": 100,
}
DEFAULT = "high"
_RENDERED = "Reasoning Effort: 75 (range 1-100, "


@dataclass(frozen=True)
class Effort:
    """What a request asks for.

    Attributes:
        name: what the encoding is told.
        number: what stands in the prompt, None without thinking.
        is_custom: the number is to be written over the one of `name`.
    """

    name: str
    number: int | None
    is_custom: bool = False


def read_effort(value: object, param: str) -> Effort | None:
    """Return the effort that a request names, None where it names none.

    Raises:
        UserError: it is neither a known name nor a whole number from 1 to 100.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in NAMES:
        return Effort(value, NAMES[value])
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return Effort(DEFAULT, value, is_custom=True)
    names = ", ".join(NAMES)
    shown = repr(value)[:40]
    raise UserError(f"{param} is {shown}; accepted are {names} and whole numbers from 1 to 100", param=param)


def write_effort(segments: list[Segment], number: int, param: str) -> list[Segment]:
    """Return a prompt rendered with `high` in which the effort is another number.

    Raises:
        UserError: the prompt has no effort line, as those of the older encoding.
    """
    for index, segment in enumerate(segments):
        if segment.is_special:
            continue
        if not segment.text.startswith(_RENDERED):
            break
        text = segment.text.replace("75", str(number), 1)
        return [*segments[:index], Segment(text, is_special=False), *segments[index + 1 :]]
    raise UserError(f"{param} is {number}; this model's encoding accepts {', '.join(NAMES)} only", param=param)
