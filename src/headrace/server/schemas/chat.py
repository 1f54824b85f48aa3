"""The body of `POST /v1/chat/completions`."""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field

from headrace.core.errors import UserError
from headrace.server.protocol.conversation import Wanted
from headrace.server.protocol.effort import read_effort
from headrace.server.protocol.fields import as_list, as_object, keep_known
from headrace.server.schemas.body import Body
from headrace.server.schemas.extensions import Extensions, listed, stops

_PASSED = {
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "logprobs",
    "top_logprobs",
    "frequency_penalty",
    "presence_penalty",
    "response_format",
    "tool_choice",
    "stream",
}
_MESSAGE = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "prefix"}
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_MESSAGE_UNUSED = {"name"}
_REASONING_NAMES = ("reasoning_content", "reasoning", "reasoning_text")
_PARTS = {"type", "text", "image_url"}
_FUNCTION = {"name", "description", "parameters", "strict"}
_CHOICE = {"type", "function"}
_FORMAT = {"type", "json_schema", "regex"}
_SCHEMA = {"name", "description", "schema", "strict"}


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    include_usage: bool | None = Field(None, description="A last chunk with token counts.")
    include_obfuscation: Literal[False] | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled"]


class ChatRequest(Extensions):
    """A conversation to be continued."""

    messages: list[dict[str, Any]] = Field(json_schema_extra=listed(_ROLES, "Hello"))
    model: str | None = Field(None, description="The served model; it may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    response_format: dict[str, Any] | None = Field(None, description="text, json_object, json_schema or regex.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | int | None = Field(None, description="A name or a whole number from 1 to 100.")
    thinking: Thinking | None = None
    continue_final_message: bool | None = Field(None, description="The last message is the beginning of the answer.")
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def wanted(self, cache_salt: str | None) -> Wanted:
        """Return the request with every field checked by name.

        Raises:
            UserError: a field is not supported, or two do not go together.
        """
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options goes with stream: true", param="stream_options")
        effort = read_effort(self.reasoning_effort, "reasoning_effort")
        body = self.given(_PASSED)
        body["messages"] = [_message(one, f"messages.{index}") for index, one in enumerate(self.messages)]
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise UserError("max_tokens and max_completion_tokens differ; accepted is one", param="max_tokens")
            body["max_tokens"] = self.max_completion_tokens
        if self.continue_final_message:
            _continue(body["messages"])
        if self.response_format is not None:
            body["response_format"] = _format(self.response_format)
        if self.tools:
            body["tools"] = [_tool(one, f"tools.{index}") for index, one in enumerate(self.tools)]
        is_forced = _is_forced(self.tool_choice)
        if is_forced and not self.tools:
            raise UserError("tool_choice asks for a call and there are no tools", param="tool_choice")
        if isinstance(self.tool_choice, dict):
            body["tool_choice"] = _with_known(self.tool_choice, _CHOICE, "function", {"name"}, "tool_choice")
        if self.thinking is not None:
            body["thinking"] = {"type": self.thinking.type}
        if effort is not None:
            body["reasoning_effort"] = effort.name
        elif is_forced and self.thinking is None:
            body["thinking"] = {"type": "disabled"}  # a forced call has no room for reasoning
        return Wanted(
            dialect="chat",
            body=body,
            sampling=self._sampling(),
            effort=effort,
            is_parallel=self.parallel_tool_calls is not False,
            cache_salt=cache_salt,
        )

    def _sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "n", "top_logprobs", "frequency_penalty", "presence_penalty")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {
            **found,
            **self.extra_sampling(),
            "logprobs": bool(self.logprobs),
            "stop": stops(self.stop),
        }


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    message = dict(message)
    reasoning = next((message[name] for name in _REASONING_NAMES if isinstance(message.get(name), str)), None)
    for name in _REASONING_NAMES:
        if not isinstance(message.get(name), str | None):
            raise UserError(f"{where}.{name} is not text", param=f"{where}.{name}")
        message.pop(name, None)
    kept = keep_known(message, _MESSAGE, where, _MESSAGE_UNUSED)
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if reasoning is not None and kept.get("role") == "assistant":
        kept["reasoning_content"] = reasoning
    elif reasoning:
        raise UserError(f"{where}.reasoning_content goes with role assistant only", param=f"{where}.reasoning_content")
    if isinstance(kept.get("content"), list):
        parts = [as_object(part, f"{where}.content.{index}") for index, part in enumerate(kept["content"])]
        kept["content"] = [
            _with_known(part, _PARTS, "image_url", {"url", "detail"}, f"{where}.content.{index}")
            for index, part in enumerate(parts)
        ]
    if kept.get("tool_calls") in (None, []):
        kept.pop("tool_calls", None)
    else:
        calls = as_list(kept["tool_calls"], f"{where}.tool_calls")
        kept["tool_calls"] = [_call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)]
    return kept


def _format(form: dict[str, Any]) -> dict[str, Any]:
    return _with_known(form, _FORMAT, "json_schema", _SCHEMA, "response_format")


def _with_known(
    value: dict[str, Any], known: Collection[str], inner: str, known_inside: Collection[str], where: str
) -> dict[str, Any]:
    """Return an object with known fields, in field `inner` too where that is an object."""
    kept = keep_known(value, known, where)
    if isinstance(kept.get(inner), dict):
        kept[inner] = keep_known(kept[inner], known_inside, f"{where}.{inner}")
    return kept


def _call(call: Any, where: str) -> dict[str, Any]:
    kept = keep_known(as_object(call, where), {"id", "type", "function"}, where, {"index"})
    function = as_object(kept.get("function"), f"{where}.function")
    return {**kept, "type": "function", "function": keep_known(function, {"name", "arguments"}, f"{where}.function")}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kept = keep_known(tool, {"type", "function"}, where)
    function = as_object(kept.get("function"), f"{where}.function")
    return {**kept, "function": keep_known(function, _FUNCTION, f"{where}.function")}


def _continue(messages: list[dict[str, Any]]) -> None:
    if not messages or messages[-1].get("role") != "assistant":
        raise UserError(
            "continue_final_message goes with a last message of role assistant", param="continue_final_message"
        )
    messages[-1]["prefix"] = True


def _is_forced(choice: str | dict[str, Any] | None) -> bool:
    return choice == "required" or isinstance(choice, dict)
