"""Names of the fields inside a body: what is not on a list is refused by name, so that nothing is ignored."""

from collections.abc import Collection
from typing import Any

from headrace.core.errors import UserError


def keep_known(
    value: dict[str, Any], known: Collection[str], where: str, unused: Collection[str] = ()
) -> dict[str, Any]:
    """Return an object without its empty unknown fields and without those that mean nothing here.

    Args:
        value: the object.
        known: fields that are passed on.
        where: what the object is called.
        unused: fields that clients send and that change nothing.

    Raises:
        UserError: a field that holds something is on neither list.
    """
    kept = {}
    for name, content in value.items():
        if name in known:
            kept[name] = content
        elif name not in unused and content not in (None, [], {}, ""):
            raise UserError(
                f"{where}.{name} is not supported; accepted are {', '.join(sorted(known))}", param=f"{where}.{name}"
            )
    return kept


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return an object.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where} is not an object", param=where)
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """Return a list.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, list):
        raise UserError(f"{where} is not a list", param=where)
    return value
