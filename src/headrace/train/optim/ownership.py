"""Find the one rule that owns each parameter; anything else is an error.

A parameter that no rule names, or that two rules name, is refused by name: there is no default rule. Read `rules.py`
before and `optimizer.py` after.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.architecture import Config
from headrace.train.optim.rules import FAMILIES, Rule, Update

_PLACEHOLDERS = {"{block}": r"(?:layers|mtp)\.\d+", "{n}": r"\d+"}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How many equal row slices the named splits of a rule stand for."""

    heads: int
    index_heads: int
    groups: int

    @classmethod
    def of(cls, config: Config) -> "Splits":
        """Take the counts of a model's configuration."""
        return cls(heads=config.num_heads, index_heads=config.index_heads, groups=config.o_groups)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What moves one parameter.

    Attributes:
        group: the line of the family's table.
        update: "muon", "adamw" or "sinkhorn".
        matrices: independent matrices the rows of the parameter are cut into; 1 outside Muon.
        rate: factor of the learning rate.
        decay: decoupled weight decay.
    """

    group: str
    update: Update
    matrices: int
    rate: float
    decay: float


def family_rules(family: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Rule, ...]:
    """Return a family's table, with some fields of some groups changed.

    Args:
        family: "v4" or "v4.1".
        changes: group -> field -> value, such as `{"embedding": {"rate": 4.0}, "engram_table": {"update": "adamw"}}`.

    Raises:
        UserError: the family, a group or a field is unknown.
    """
    if family not in FAMILIES:
        raise UserError(f"Optimizer family {family!r} is unknown; {_list(FAMILIES)} are accepted.", param="family")
    rules = FAMILIES[family]
    wanted = dict(changes or {})
    known = {rule.group for rule in rules}
    changeable = {field.name for field in fields(Rule)} - {"group", "names"}
    for group, values in wanted.items():
        if group not in known:
            raise UserError(f"Family {family} has no parameter group {group!r}; it has {_list(known)}.", param=group)
        for field in values:
            if field not in changeable:
                raise UserError(
                    f"Group {group!r} has no field {field!r} to change; {_list(changeable)} are accepted.", param=field
                )
    return tuple(replace(rule, **wanted.get(rule.group, {})) for rule in rules)


def assign(
    shapes: Mapping[str, Collection[int]], rules: Iterable[Rule], splits: Splits, frozen: Collection[str] = ()
) -> dict[str, Owner]:
    """Return the owner of every parameter that is not frozen.

    Args:
        shapes: parameter name -> shape.
        rules: a family's table.
        splits: counts behind the named splits.
        frozen: names, or patterns as in a rule with `*` for any rest of a name, of what nothing may move. A frozen
            parameter must be known to the table like any other.

    Raises:
        UserError: a parameter has no rule or two, belongs to the balance of the experts, or has a shape its rule
            cannot use; or a frozen name matches nothing.
    """
    compiled = [(rule, _matcher(rule.names)) for rule in rules]
    held = frozen_names(shapes, frozen)
    owners: dict[str, Owner] = {}
    for name, shape in shapes.items():
        owner = _owner(name, tuple(shape), compiled, splits)
        if name not in held:
            owners[name] = owner
    return owners


def frozen_names(names: Iterable[str], frozen: Collection[str]) -> frozenset[str]:
    """Return the parameter names that the frozen names and patterns stand for.

    Raises:
        UserError: one of them matches no parameter.
    """
    everything = tuple(names)
    held: set[str] = set()
    for pattern in frozen:
        matcher = _matcher((pattern,))
        matched = {name for name in everything if matcher.fullmatch(name)}
        if not matched:
            raise UserError(f"Frozen name {pattern!r} matches no parameter of the model.", param="frozen")
        held |= matched
    return frozenset(held)


def _matcher(names: Iterable[str]) -> re.Pattern[str]:
    parts = []
    for name in names:
        escaped = re.escape(name).replace(r"\*", ".*")
        for placeholder, expression in _PLACEHOLDERS.items():
            escaped = escaped.replace(re.escape(placeholder), expression)
        parts.append(escaped)
    return re.compile("|".join(f"(?:{part})" for part in parts))


def _owner(name: str, shape: tuple[int, ...], compiled: list[tuple[Rule, re.Pattern[str]]], splits: Splits) -> Owner:
    matching = [rule for rule, matcher in compiled if matcher.fullmatch(name)]
    if not matching:
        raise UserError(f"Parameter {name} has no update rule; names of the family's table are accepted.", param=name)
    if len(matching) > 1:
        raise UserError(
            f"Parameter {name} has {len(matching)} update rules ({_list(rule.group for rule in matching)}); one is "
            "accepted.",
            param=name,
        )
    rule = matching[0]
    if rule.update == "balance":
        raise UserError(
            f"{name} is moved by the balance of the experts and not by an optimizer; a buffer is accepted.", param=name
        )
    matrices = _matrices(name, shape, rule, splits) if rule.update == "muon" else 1
    if rule.update == "sinkhorn" and len(shape) != 2:
        raise UserError(f"Parameter {name} has shape {list(shape)}; the Sinkhorn rule accepts a table.", param=name)
    return Owner(group=rule.group, update=rule.update, matrices=matrices, rate=rule.rate, decay=rule.decay)


def _matrices(name: str, shape: tuple[int, ...], rule: Rule, splits: Splits) -> int:
    """Count the matrices Muon sees in a parameter."""
    if rule.split == "experts":
        if len(shape) != 3:
            raise UserError(
                f"Parameter {name} has shape {list(shape)}; one matrix per expert, stacked, is accepted.", param=name
            )
        return shape[0]
    if len(shape) != 2:
        raise UserError(f"Parameter {name} has shape {list(shape)}; Muon accepts a matrix here.", param=name)
    named = {"whole": 1, "heads": splits.heads, "index_heads": splits.index_heads, "groups": splits.groups}
    count = rule.split if isinstance(rule.split, int) else named[rule.split]
    if count < 1 or shape[0] % count:
        raise UserError(
            f"Parameter {name} has {shape[0]} rows, which do not divide into {count} matrices ({rule.split}).",
            param=name,
        )
    return count


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
