"""Take typed values out of one JSON object, so that nothing in it is missed, misread or silently ignored.

A key is named in refusals the way the file spells it. Whatever no reader asked for is unknown and refused by `finish`.
Knows JSON and number ranges, nothing of the model. Read `config.py` next.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace.core.errors import UserError

MAX_COUNT: Final = 2**31 - 1
_SMALLEST_FLOAT32: Final = 2.0**-126
_LARGEST_FLOAT32: Final = 3.4028234663852886e38


class Required:
    """Stands for "no default": a missing key is refused."""


REQUIRED: Final = Required()


def shown(value: Any) -> str:
    """Show a JSON value in a refusal, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Fields:
    """One JSON object that is being read, under one spelling of its keys.

    Owns the record of which keys were asked for. Two views of the same object share that record.
    """

    def __init__(self, values: Any, where: str, *, prefix: str = "", spelling: Mapping[str, str] | None = None) -> None:
        if not isinstance(values, dict):
            place = f"{where}: {prefix.rstrip('.')}" if prefix else where
            raise UserError(f"{place} must be a JSON object, not {shown(values)}.", param=prefix.rstrip(".") or None)
        self._values: dict[str, Any] = values
        self._where = where
        self._prefix = prefix
        self._spelling = spelling or {}
        self._asked: set[str] = set()

    def view(self, spelling: Mapping[str, str]) -> "Fields":
        """Return the same object under another spelling."""
        other = Fields(self._values, self._where, prefix=self._prefix, spelling=spelling)
        other._asked = self._asked
        return other

    def section(self, key: str, *, may_be_absent: bool = False) -> "Fields":
        """Return the object that stands under `key`; an empty one where it is absent and may be."""
        values = self._take(key, {} if may_be_absent else REQUIRED)
        return Fields({} if values is None and may_be_absent else values, self._where, prefix=f"{self._prefix}{key}.")

    def name(self, key: str) -> str:
        """The key as the file spells it, with the sections it stands in."""
        return f"{self._prefix}{self._spelling.get(key, key)}"

    def has(self, key: str) -> bool:
        """Whether the object has the key."""
        return self._spelling.get(key, key) in self._values

    def refuse(self, key: str, rule: str) -> UserError:
        """Build the refusal of the value under `key`: place, value, rule."""
        value = self._values.get(self._spelling.get(key, key))
        return UserError(f"{self._where}: {self.name(key)} is {shown(value)}; {rule}.", param=self.name(key))

    def _take(self, key: str, default: Any) -> Any:
        spelled = self._spelling.get(key, key)
        self._asked.add(spelled)
        if spelled in self._values:
            return self._values[spelled]
        if isinstance(default, Required):
            raise UserError(f"{self._where}: {self.name(key)} is missing.", param=self.name(key))
        return default

    def integer(self, key: str, low: int = 1, high: int = MAX_COUNT, *, default: int | Required = REQUIRED) -> int:
        """Take a whole number from `low` to `high`; a boolean or 3.0 is not one."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"a whole number from {low} to {high} is accepted")
        return value

    def number(
        self, key: str, *, above: float = 0.0, zero: bool = False, default: float | Required = REQUIRED
    ) -> float:
        """Take a number above `above` that float32 can hold; 0 too where `zero` is set."""
        value = self._take(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if zero and value == 0:
                return 0.0
            if max(above, 0.0) < value <= _LARGEST_FLOAT32 and value >= _SMALLEST_FLOAT32:
                return float(value)
        rule = f"a number above {above:g}{', or 0,' if zero else ''} that float32 can hold is accepted"
        raise self.refuse(key, rule)

    def optional_number(self, key: str) -> float | None:
        """Take a positive number, or None where the key is absent or null."""
        return None if self._take(key, None) is None else self.number(key)

    def integers(
        self, key: str, low: int = 0, high: int = MAX_COUNT, *, default: Iterable[int] | Required = REQUIRED
    ) -> tuple[int, ...]:
        """Take a list of whole numbers from `low` to `high`."""
        value = self._take(key, default)
        if not isinstance(value, list | tuple) or any(
            not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high for item in value
        ):
            raise self.refuse(key, f"a list of whole numbers from {low} to {high} is accepted")
        return tuple(value)

    def constant(self, key: str, *accepted: Any, default: Any = REQUIRED) -> None:
        """Take a value that must be one of `accepted`: headrace implements no other."""
        value = self._take(key, default)
        if not any(type(value) is type(item) and value == item for item in accepted):
            raise self.refuse(key, f"headrace implements {' or '.join(map(shown, accepted))}")

    def skip(self, keys: Iterable[str]) -> None:
        """Mark keys as seen without reading them: they belong to a part the model does not have."""
        self._asked.update(self._spelling.get(key, key) for key in keys)

    def finish(self, ignored: Mapping[str, str]) -> None:
        """Refuse every key that nobody asked for.

        Args:
            ignored: keys that have no effect here, with the reason.

        Raises:
            UserError: the object holds a key that is neither asked for nor in `ignored`.
        """
        for key, value in self._values.items():
            if key not in self._asked and key not in ignored:
                raise UserError(
                    f"{self._where}: {self._prefix}{key} is {shown(value)}, a key headrace does not know, so it may "
                    "not be ignored; remove it if it has no effect.",
                    param=f"{self._prefix}{key}",
                )
