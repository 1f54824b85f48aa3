"""What decoding enforces of what a request asks for: JSON, a pattern, calls of tools."""

import json
from typing import Any, NamedTuple

from headrace.engine.sampling.spec import Structured
from headrace.server.protocol.segments import MARKER, THINK_END

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KINDS = {"json", "regex", "tool_call", "tool_call_required"}


class Constraint(NamedTuple):
    """What decoding has to enforce: kind and schema as `deepseek_recipe.OutputConstraint` has them."""

    kind: str
    schema: str


def structured(
    constraint: Constraint | None, *, encoding: str, is_thinking: bool, is_parallel: bool
) -> Structured | None:
    """Return what an answer must look like, None where everything is accepted.

    Args:
        constraint: what the request's conversion found.
        encoding: "v4.1" or "v4".
        is_thinking: the answer begins with reasoning, which is free.
        is_parallel: whether one answer may hold several calls.

    Raises:
        UserError: the schema, pattern or tools cannot be followed.
    """
    if constraint is None or constraint.kind not in _KINDS:
        return None
    after = (THINK_END,) if is_thinking else ()
    if constraint.kind == "regex":
        return _late(Structured.regex(constraint.schema), after)
    if constraint.kind == "json":
        return _late(Structured.json_schema(_styled(constraint.schema)), after)
    functions = [tool["function"] for tool in json.loads(constraint.schema)]
    if constraint.kind == "tool_call_required":
        return _late(_calls(functions, encoding=encoding, is_parallel=is_parallel, is_opened=True), after)
    if is_parallel and not any(function.get("strict") for function in functions):
        return None
    spec = _calls(functions, encoding=encoding, is_parallel=is_parallel, is_opened=False)
    return Structured(spec.kind, spec.text, (*after, MARKER), is_optional=True)


def _calls(functions: list[dict[str, Any]], *, encoding: str, is_parallel: bool, is_opened: bool) -> Structured:
    tools = [{"name": one["name"], "parameters": one.get("parameters") or {}} for one in functions]
    return Structured.tool_calls(tools, dialect=encoding, is_parallel=is_parallel, is_opened=is_opened)


def _styled(schema: str) -> dict[str, Any] | bool:
    """Return a schema whose JSON has no line ends and no spaces but those the encoding writes itself.

    A small model left free to write blanks can go on doing so until its answer is full.
    """
    found = json.loads(schema) if schema else {"type": "object"}
    return {**found, "x-guidance": _JSON_STYLE} if isinstance(found, dict) else bool(found)


def _late(spec: Structured, after: tuple[str, ...]) -> Structured:
    return Structured(spec.kind, spec.text, after) if after else spec
