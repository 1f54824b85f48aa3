"""The grammar of tool calls in the markup of DeepSeek's encodings, made from a list of tools.

A call names one of the tools and gives its parameters in the order of their schema, required ones always. Text stands
between the tags as it is (`string="true"`), every other value as JSON (`string="false"`). The marker inside each tag is
a token of its own, so no text can hold one; that no text spells one out in letters is part of the grammar.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import UserError

MARKER = "｜DSML｜"
_MAX_COUNTED_CHARACTERS = 4096  # a longer text is not counted while it is written
_MAX_REFERENCES = 16
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# free text up to and with the first "</", then more of it as long as no marker's bar follows
_FREE_TEXT = r"""
free: FREE_FIRST FREE_REST*
FREE_FIRST: /[^<]*(<+[^<\/｜][^<]*)*<+\//
FREE_REST: /([^<｜][^<]*)?(<+[^<\/｜][^<]*)*<+\//
"""


@dataclass(frozen=True)
class _Tags:
    """How a dialect spells what stands behind the marker."""

    block: str
    call: str
    parameter: str


_TAGS = {
    "v4.1": _Tags(" calls", " invoke", " parameter"),
    "v4": _Tags("tool_calls", "invoke", "parameter"),
}


def tool_grammar(text: str, marker_id: int) -> str:
    """Return the Lark grammar of a block of calls.

    Args:
        text: what `Structured.tool_calls` made.
        marker_id: id of the marker token.

    Raises:
        UserError: the text or a tool in it is not as it should be.
    """
    about = _about(text)
    tags = _TAGS[about["dialect"]]
    opening = "" if about["is_opened"] else _text(f"{tags.block}>\n")
    calls = "call+" if about["is_parallel"] else "call"
    rules = [
        f'start: {opening} {calls} "</" marker {_text(tags.block + ">")}',
        f"marker: <[{marker_id}]>",
        "call: " + " | ".join(f"call_{index}" for index in range(len(about["tools"]))),
    ]
    for index, tool in enumerate(about["tools"]):
        rules += _call(f"{index}", tool, tags)
    return "\n".join(rules) + _FREE_TEXT


def _about(text: str) -> dict[str, Any]:
    try:
        about = json.loads(text)
        tools, dialect = about["tools"], about["dialect"]
        is_known = dialect in _TAGS and isinstance(about["is_parallel"], bool) and isinstance(about["is_opened"], bool)
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise _refusal("the tool_calls are not a description of tools") from error
    if not is_known or not isinstance(tools, list) or not tools:
        raise _refusal("the tool_calls are not a description of tools; accepted is a list of one or more")
    return dict(about)


def _call(name: str, tool: Mapping[str, Any], tags: _Tags) -> list[str]:
    title, schema = tool.get("name"), tool.get("parameters")
    schema = {} if schema is None or schema is True else schema
    if not isinstance(title, str) or not title or not isinstance(schema, dict):
        raise _refusal(f"tool {title!r} is not understood; accepted is a name and a JSON schema of its parameters")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refusal(f"the parameters of tool {title!r} are no JSON schema of an object")
    properties = properties | {key: {} for key in required if isinstance(key, str) and key not in properties}
    rules: list[str] = []
    parts: list[str] = []
    for index, (key, value) in enumerate(properties.items()):
        rule = f"p_{name}_{index}"
        parts.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: " + " | ".join(_forms(_attribute(key), value, schema, tags)))
    opening = _text(f'{tags.call} name="{_attribute(title)}">\n')
    closing = _text(f"{tags.call}>\n")
    return [f'call_{name}: "<" marker {opening} {" ".join(parts)} "</" marker {closing}', *rules]


def _forms(key: str, schema: Any, root: Mapping[str, Any], tags: _Tags) -> list[str]:
    """Return every way of writing a parameter: as text, as JSON, or either."""
    texts, others = _split(schema, root)
    closing = _text(f"{tags.parameter}>\n")

    def written(value: str, is_text: str, end: str = '"</"') -> str:
        opening = _text(f'{tags.parameter} name="{key}" string="{is_text}">')
        return f'"<" marker {opening} {value} {end} marker {closing}'

    forms = [written("free", "true", "") if text is None else written(text, "true") for text in dict.fromkeys(texts)]
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    for other in others:
        value = {"x-guidance": _JSON_STYLE, **definitions, **(other if isinstance(other, dict) else {})}
        forms.append(written(f"%json {json.dumps(value, ensure_ascii=False)}", "false"))
    if not forms:
        raise _refusal(f"parameter {key!r} allows no value")
    return forms


def _split(schema: Any, root: Mapping[str, Any]) -> tuple[list[str | None], list[Any]]:
    """Return the texts a schema allows (a pattern of the grammar each, None for any text), and schemas of the rest."""
    schema = _resolved(schema, root)
    if schema is True or schema == {}:
        return [None], []
    if not isinstance(schema, dict):
        raise _refusal(f"the schema {schema!r} of a parameter allows no value or is no schema")
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_split(one, root) for one in schema[key]]
            return [text for texts, _ in found for text in texts], [one for _, others in found for one in others]
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if isinstance(schema.get("enum"), list):
        words = [value for value in schema["enum"] if isinstance(value, str) and value and MARKER not in value]
        others = [value for value in schema["enum"] if not isinstance(value, str)]
        choice = "(" + " | ".join(json.dumps(word) for word in words) + ")"
        return [choice] if words else [], [{"enum": others}] if others else []
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        return [], [schema]
    rest = [kind for kind in kinds if kind != "string"]
    return [_words(schema)] if "string" in kinds else [], [{**schema, "type": rest}] if rest else []


def _words(schema: Mapping[str, Any]) -> str | None:
    """Return a pattern for the text a schema allows, None where any text may stand."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$") and "\n" not in pattern:
        return "/" + pattern[1:-1].replace("\\/", "/").replace("/", "\\/") + "/" if len(pattern) > 2 else None
    longest, shortest = schema.get("maxLength"), schema.get("minLength", 0)
    if not isinstance(longest, int) or not isinstance(shortest, int) or longest > _MAX_COUNTED_CHARACTERS:
        return None
    return f"/[^<]{{{max(0, shortest)},{longest}}}/"


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is None:
            return schema
        place: Any = root
        for part in str(reference).removeprefix("#/").split("/"):
            place = place.get(part) if isinstance(place, dict) else None
        if not str(reference).startswith("#/") or place is None:
            raise _refusal(f"the reference {reference!r} in a tool's parameters leads nowhere")
        schema = place
    raise _refusal("the references in a tool's parameters go round in circles")


def _attribute(name: str) -> str:
    if any(character in name for character in '"<>\n') or MARKER in name or not name:
        raise _refusal(f"the name {name!r} cannot stand in a tag; accepted are names without quotes, < and >")
    return name


def _text(text: str) -> str:
    return json.dumps(text)


def _refusal(message: str) -> UserError:
    return UserError(message, param="tools")
