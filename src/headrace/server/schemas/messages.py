"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Any, Literal

from pydantic import Field

from headrace.core.errors import UserError
from headrace.server.protocol.conversation import Wanted
from headrace.server.protocol.effort import read_effort
from headrace.server.protocol.fields import as_object, keep_known
from headrace.server.schemas.body import Body
from headrace.server.schemas.extensions import Extensions, listed

_PASSED = {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream"}
_UNUSED = {"cache_control", "citations"}
_BLOCKS: dict[str, set[str]] = {
    "text": {"type", "text"},
    "image": {"type", "source"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
    "tool_result": {"type", "tool_use_id", "content", "is_error"},
}
_BLOCKS_UNUSED = {"caller"}
_SOURCE = {"type", "media_type", "data", "url"}
_TOOL = {"name", "description", "input_schema", "strict", "type"}


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Accepted and not used: the effort decides.")
    display: Literal["summarized"] | None = None


class OutputConfig(Body):
    """How much the model reasons, and what the answer looks like."""

    effort: str | int | None = Field(None, description="A name or a whole number from 1 to 100.")
    format: dict[str, Any] | None = Field(None, description="json_schema.")


class ToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Extensions):
    """A conversation whose tokens are counted."""

    messages: list[dict[str, Any]] = Field(json_schema_extra=listed(("user", "assistant"), "Hello"))
    model: str | None = Field(None, description="The served model; it may be left out.")
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Accepted and not used: all prompts are cached.")

    def wanted(self, cache_salt: str | None) -> Wanted:
        """Return the request with every field checked by name.

        Raises:
            UserError: a field is not supported, or two do not go together.
        """
        config, choice = self.output_config, self.tool_choice
        effort = read_effort(None if config is None else config.effort, "output_config.effort")
        body = self.given(_PASSED)
        body["messages"] = [_message(one, f"messages.{index}") for index, one in enumerate(self.messages)]
        if self.system is not None:
            body["system"] = _content(self.system, "system")
        if self.tools:
            body["tools"] = [_tool(one, f"tools.{index}") for index, one in enumerate(self.tools)]
        forced = _forced(choice)
        if forced is not None and not self.tools:
            raise UserError("tool_choice asks for a call and there are no tools", param="tool_choice")
        if choice is not None and forced is None:
            body["tool_choice"] = {"type": choice.type}
        if self.thinking is not None:
            body["thinking"] = self.thinking.model_dump(exclude_none=True, include={"type", "budget_tokens"})
        elif forced is not None and effort is None:
            body["thinking"] = {"type": "disabled"}  # a forced call has no room for reasoning
        if effort is not None:
            body["output_config"] = {"effort": effort.name}
        return Wanted(
            dialect="messages",
            body=body,
            sampling=self.sampling(),
            effort=effort,
            effort_param="output_config.effort",
            is_parallel=not (choice is not None and choice.disable_parallel_tool_use),
            forced=forced,
            schema=None if config is None else _schema(config.format),
            is_continued=bool(body["messages"]) and body["messages"][-1].get("role") == "assistant",
            cache_salt=cache_salt,
        )

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the request sets."""
        return {**self.extra_sampling(), "logprobs": False}


class MessagesRequest(CountRequest):
    """A conversation to be continued."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the request sets."""
        found = {name: getattr(self, name) for name in ("temperature", "top_p") if getattr(self, name) is not None}
        return {**found, **super().sampling(), "stop": list(self.stop_sequences or ())}


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    kept = keep_known(message, {"role", "content"}, where)
    if "content" in kept:
        kept["content"] = _content(kept["content"], f"{where}.content")
    return kept


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    return [_block(as_object(one, f"{where}.{index}"), f"{where}.{index}") for index, one in enumerate(content)]


def _block(block: dict[str, Any], where: str) -> dict[str, Any]:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise UserError(
            f"{where} has type {str(kind)[:40]!r}; accepted are {', '.join(_BLOCKS)}", param=f"{where}.type"
        )
    kept = keep_known(block, _BLOCKS[kind], where, _UNUSED | _BLOCKS_UNUSED)
    if kind == "tool_result" and "content" in kept:
        kept["content"] = _content(kept["content"], f"{where}.content")
    if kind == "image":
        kept["source"] = keep_known(as_object(kept.get("source"), f"{where}.source"), _SOURCE, f"{where}.source")
    return kept


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise UserError(f"{where} has type {str(tool['type'])[:40]!r}; accepted is 'custom'", param=f"{where}.type")
    return keep_known(tool, _TOOL, where, _UNUSED)


def _forced(choice: ToolChoice | None) -> str | None:
    if choice is None or choice.type in ("auto", "none"):
        return None
    if choice.type == "any":
        return ""
    if not choice.name:
        raise UserError("tool_choice.name is missing", param="tool_choice.name")
    return choice.name


def _schema(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    kept = keep_known(form, {"type", "schema"}, "output_config.format", {"name"})
    if kept.get("type") != "json_schema":
        raise UserError("output_config.format.type is not 'json_schema'", param="output_config.format.type")
    return as_object(kept.get("schema"), "output_config.format.schema")
