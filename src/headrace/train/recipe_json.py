"""Recipes as JSON: what a run wrote down can be read back, and a field that no recipe has is refused by name.

The model stands in the nested spelling of its checkpoint's `config.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.core.errors import UserError
from headrace.models.deepseek_v41 import config as model_config
from headrace.models.deepseek_v41.architecture import Config
from headrace.train.draft_recipe import DraftRecipe
from headrace.train.recipe import Recipe

MAY_DIFFER = ("evaluation", "calibration", "saving", "threads", "duration")
"""Fields that a resumed run may have otherwise: no step depends on them."""


def to_json(value: Any) -> Any:
    """Return a recipe, or any part of one, as JSON can hold it."""
    if isinstance(value, Config):
        return model_config.to_json(value)
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(document: Any, where: str = "the recipe") -> Recipe | DraftRecipe:
    """Build a recipe from a document; one with a field `draft` trains a draft.

    Args:
        document: what `to_json` returned, or the like; fields with a default may be missing.
        where: how to name it in a refusal.

    Raises:
        UserError: a field is unknown or missing, has the wrong type, or the recipe refuses its value.
    """
    is_draft = isinstance(document, dict) and "draft" in document
    recipe: Recipe | DraftRecipe = _read(document, DraftRecipe if is_draft else Recipe, where)
    return recipe


def difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Return the first field in which two documents differ, as `a.b`, and both values; None if they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if path == "" and name in MAY_DIFFER:
                continue
            found = difference(ours.get(name), theirs.get(name), f"{path}.{name}" if path else name)
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} ({_short(theirs)}, now {_short(ours)})"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(value: Any, kind: Any, where: str) -> Any:
    """Read one value of an annotated type."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if kind is Config:
        return model_config.from_json(value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_fields(value, kind, where)
    if origin in {Union, UnionType}:
        return _read_union(value, get_args(kind), where)
    if origin is Literal:
        return _expect(value in get_args(kind), value, where, f"one of {', '.join(map(str, get_args(kind)))}")
    if origin is tuple:
        return _read_tuple(value, get_args(kind), where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), value, where, "an object")
        return {name: _read(item, get_args(kind)[1], f"{where}.{name}") for name, item in value.items()}
    return _read_plain(value, kind, where)


def _read_plain(value: Any, kind: Any, where: str) -> Any:
    if kind is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_expect(is_number, value, where, "a number"))
    names = {int: "a whole number", bool: "true or false", str: "a text", NoneType: "null"}
    is_right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    return _expect(is_right, value, where, names[kind])


def _read_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, (list, tuple)), value, where, "a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read(item, items[0], f"{where}[{index}]") for index, item in enumerate(value))
    _expect(len(value) == len(items), value, where, f"a list of {len(items)}")
    return tuple(
        _read(item, kind, f"{where}[{index}]") for index, (item, kind) in enumerate(zip(value, items, strict=True))
    )


def _read_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return _read(value, others[0], where)
    given = set(value) if isinstance(value, dict) else set()
    for kind in others:
        if is_dataclass(kind) and given == {field.name for field in fields(kind)}:
            return _read(value, kind, where)
        if not is_dataclass(kind) and isinstance(value, get_origin(kind) or kind) and not isinstance(value, bool):
            return _read(value, kind, where)
    accepted = [", ".join(field.name for field in fields(kind)) for kind in others if is_dataclass(kind)]
    raise UserError(f"{where} is {_short(value)}; fields {' or '.join(accepted)} are accepted.", param=where)


def _read_fields(value: Any, kind: type, where: str) -> Any:
    _expect(isinstance(value, dict), value, where, "an object")
    known = {field.name: field for field in fields(kind)}
    for name in value:
        if name not in known:
            raise UserError(
                f"{where} has the unknown field {name!r}; {', '.join(sorted(known))} are accepted.", param=name
            )
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where} lacks the field {name!r}.", param=name)
    hints = get_type_hints(kind)
    return kind(**{name: _read(item, hints[name], f"{where}.{name}") for name, item in value.items()})


def _expect(is_right: bool, value: Any, where: str, accepted: str) -> Any:
    if not is_right:
        raise UserError(f"{where} is {_short(value)}; {accepted} is accepted.", param=where)
    return value
