"""The body of `POST /v1/responses`."""

import json
from typing import Any, Literal

from pydantic import Field

from headrace.core.errors import UserError
from headrace.server.protocol.conversation import Wanted
from headrace.server.protocol.effort import read_effort
from headrace.server.protocol.fields import as_object, keep_known
from headrace.server.schemas.body import Body
from headrace.server.schemas.extensions import Extensions, stops

_PASSED = {"instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "user", "stream"}
_LOGPROBS = "message.output_text.logprobs"
_IGNORED_INCLUDES = {"reasoning.encrypted_content"}
_ITEMS: dict[str, tuple[set[str], set[str]]] = {
    "message": ({"type", "role", "content"}, {"id", "status", "phase"}),
    "reasoning": ({"type", "content", "summary"}, {"id", "status", "encrypted_content"}),
    "function_call": ({"type", "call_id", "name", "arguments", "namespace"}, {"id", "status"}),
    "function_call_output": ({"type", "call_id", "output"}, {"id", "status"}),
}
_PARTS = {"type", "text", "image_url", "detail", "refusal"}
_PARTS_UNUSED = {"annotations", "logprobs"}
_TOOL = {"type", "name", "description", "parameters", "strict"}


class Reasoning(Body):
    """Whether and how much the model reasons before it answers."""

    effort: str | int | None = Field(None, description="A name or a whole number from 1 to 100.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Reasoning is given whole.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Text(Body):
    """What the answer looks like."""

    format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    verbosity: Literal["medium"] | None = None


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Extensions):
    """A conversation to be continued."""

    input: str | list[dict[str, Any]]
    model: str | None = Field(None, description="The served model; it may be left out.")
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = Field(None, description=f"Accepted: {_LOGPROBS}, reasoning.encrypted_content.")
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Keep the response for later; true if missing.")
    stop: str | list[str] | None = Field(None, description="Strings that end the answer.")
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the answer are asked for."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def echo(self) -> dict[str, Any]:
        """Return what a response says of its request.

        Raises:
            UserError: it holds half a character.
        """
        found: dict[str, Any] = {
            "store": self.store is not False,
            "previous_response_id": self.previous_response_id,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
        }
        if self.reasoning is not None:
            found["reasoning"] = {"effort": self.reasoning.effort, "summary": self.reasoning.summary}
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise UserError("metadata or a key holds half a character, or too many brackets", "metadata") from None
        return found

    def wanted(self, cache_salt: str | None, before: list[dict[str, Any]]) -> Wanted:
        """Return the request with every field checked by name.

        Args:
            cache_salt: cached prefixes are shared only between requests of the same salt.
            before: items of the conversation that the request goes on from.

        Raises:
            UserError: a field is not supported, or two do not go together.
        """
        for name in self.include or ():
            if name != _LOGPROBS and name not in _IGNORED_INCLUDES:
                raise UserError(f"include names {name[:60]!r}; accepted is {_LOGPROBS!r}", param="include")
        given = None if self.reasoning is None else self.reasoning.effort
        effort = read_effort(given, "reasoning.effort")
        items = [*before, *self.items]
        body = self.given(_PASSED) | {"input": [_item(one, f"input.{index}") for index, one in enumerate(items)]}
        if self.wants_logprobs:
            body["include"] = [_LOGPROBS]
        if self.tools:
            body["tools"] = [_tool(one, f"tools.{index}") for index, one in enumerate(self.tools)]
        if self.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if choice is not None:
            body["tool_choice"] = (
                keep_known(choice, {"type", "name"}, "tool_choice") if isinstance(choice, dict) else choice
            )
        is_forced = choice == "required" or isinstance(choice, dict)
        if is_forced and not self.tools:
            raise UserError("tool_choice asks for a call and there are no tools", param="tool_choice")
        if effort is not None:
            body["reasoning"] = {"effort": effort.name}
        elif is_forced:
            body["reasoning"] = {"effort": "none"}  # a forced call has no room for reasoning
        if self.text is not None and self.text.format is not None:
            known = {"type", "name", "schema", "strict", "description", "regex"}
            body["text"] = {"format": keep_known(self.text.format, known, "text.format")}
        return Wanted(
            dialect="responses",
            body=body,
            sampling=self._sampling(),
            effort=effort,
            effort_param="reasoning.effort",
            is_parallel=self.parallel_tool_calls is not False,
            cache_salt=cache_salt,
        )

    def _sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_logprobs")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {
            **found,
            **self.extra_sampling(),
            "logprobs": self.wants_logprobs,
            "stop": stops(self.stop),
        }


def _item(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise UserError(f"{where} has type {str(kind)[:40]!r}; accepted are {', '.join(_ITEMS)}", param=f"{where}.type")
    known, unused = _ITEMS[kind]
    kept = keep_known({"type": kind, **item}, known, where, unused)
    for field in ("content", "output"):
        if isinstance(kept.get(field), list):
            name = f"{where}.{field}"
            parts = [as_object(part, f"{name}.{index}") for index, part in enumerate(kept[field])]
            kept[field] = [
                keep_known(part, _PARTS, f"{name}.{index}", _PARTS_UNUSED) for index, part in enumerate(parts)
            ]
    if kind == "reasoning":
        kept.setdefault("summary", [])
    return kept


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise UserError(f"{where} has type {kind!r}; accepted is 'function'", param=f"{where}.type")
    return keep_known(tool, _TOOL, where)
