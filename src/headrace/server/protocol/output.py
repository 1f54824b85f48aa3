"""From tokens of the engine to the events of a dialect: one `AnswerStream` per answer around the package's parser."""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import deepseek_recipe as recipe

from headrace.server.protocol.history import RawTurn, Said, raw_turn
from headrace.server.protocol.logprobs import Logprobs
from headrace.server.protocol.markup import Markup
from headrace.server.protocol.segments import THINK_END

if TYPE_CHECKING:
    from headrace.engine.core.events import TokenEvent
    from headrace.engine.result import Result
    from headrace.server.protocol.conversation import Dialect, Turn
    from headrace.server.protocol.segments import ChatTokens
    from headrace.text.tokenizer import Tokenizer

_RESPONSES: "dict[Dialect, Any]" = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}
_REASONS = {"stop": recipe.InferenceFinishReason.Stop}


class Event(NamedTuple):
    """One event of a stream: its name, if the dialect names events, and its content."""

    name: str | None
    data: dict[str, Any]


class AnswerStream:
    """Owns the parser of one answer and everything the answer said so far.

    Attributes:
        result: the engine's, once the answer is over.
        is_cut: the answer was cancelled, so there is no result.
        reasoning_tokens: tokens of the answer before its reasoning ended.
        logprobs: of the answer's text, where they are asked for.
    """

    def __init__(self, turn: "Turn", response_id: str, model: str, created: int) -> None:
        """Start an answer.

        Args:
            turn: the prompt.
            response_id: the response's id.
            model: name that the response carries.
            created: seconds since the epoch.
        """
        self._turn = turn
        self._kind = _RESPONSES[turn.wanted.dialect]
        parsing = turn.parsing()
        stage = parsing.thinking_initial_stage
        self._is_reasoning = stage is not None and stage.starts_in_reasoning()
        self._before_end = "" if self._is_reasoning else None  # the newest reasoning, until it is over
        self._markup = Markup(is_opened=parsing.starts_in_tool_calls) if parsing.parse_tool_calls else None
        self._parser = recipe.StreamProcessor(turn.generator(response_id, model), parsing)
        self._whole = self._kind(response_id, model, created, 0, 0)
        self._unseen = 0
        self._has_begun = self.is_cut = False
        self.result: Result | None = None
        self.reasoning_tokens = 0
        self.logprobs = Logprobs()

    def begin(self, prompt_tokens: int) -> list[Event]:
        """Return the events that come before the first token."""
        self._has_begun = True
        usage = recipe.PromptUsage(prompt_tokens=prompt_tokens)
        return self._events(self._parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def take(self, event: "TokenEvent", tokens: "ChatTokens", tokenizer: "Tokenizer") -> list[Event]:
        """Take a token of the engine, and its result with the last one; return the events that follow from it."""
        self._count(event, tokens, tokenizer)
        text = self._marked(event.text)
        if event.result is not None and self._markup is not None:
            text += self._markup.flush()
        found: list[Any] = []
        if text:
            found += self._parser.push(recipe.InferenceChunk.text(text, self._unseen))
            self._unseen = 0
        if event.result is not None:
            self.result = event.result
            reason = _REASONS.get(event.result.finish_reason, recipe.InferenceFinishReason.Length)
            found += self._parser.push(recipe.InferenceChunk.finish(reason))
            found += self._parser.finish()
        return self._events(found)

    def cut(self, prompt_tokens: int) -> list[Event]:
        """End an answer that was cancelled; return the events that close what is open."""
        self.is_cut = True
        found = [] if self._has_begun else self.begin(prompt_tokens)
        chunks = self._parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Length))
        return found + self._events([*chunks, *self._parser.finish()])

    @property
    def whole(self) -> dict[str, Any]:
        """The response as far as it got, as the dialect writes it."""
        found: dict[str, Any] = json.loads(self._whole.to_json())
        return found

    def said(self) -> Said:
        """Return what the answer says."""
        return _SAID[self._turn.wanted.dialect](self.whole)

    def raw(self, result: "Result", tokens: "ChatTokens") -> RawTurn:
        """Return the tokens of a finished answer."""
        text = result.text if isinstance(result.stop, str) else None
        return raw_turn(self._turn.tail, result.token_ids, text, tokens)

    def _marked(self, text: str) -> str:
        """Return text as the parser is to see it: calls are told apart from text, but not inside the reasoning."""
        if self._markup is None:
            return text
        if self._before_end is None:
            return self._markup.push(text)
        seen = self._before_end + text
        end = seen.find(THINK_END)
        if end < 0:
            self._before_end = seen[-len(THINK_END) :]
            return text
        behind = end + len(THINK_END) - len(self._before_end)
        self._before_end = None
        return text[:behind] + self._markup.push(text[behind:])

    def _count(self, event: "TokenEvent", tokens: "ChatTokens", tokenizer: "Tokenizer") -> None:
        if event.token_id is None:
            return
        self._unseen += 1
        if self._is_reasoning:
            if event.token_id == tokens.think_end:
                self._is_reasoning = False
                return
            self.reasoning_tokens += 1
        is_shown = self._markup is None or self._markup.is_text
        if event.logprob is not None and is_shown and event.token_id not in (tokens.eos, tokens.marker):
            self.logprobs.add(event, tokenizer, is_reasoning=self._is_reasoning)

    def _events(self, chunks: list[Any]) -> list[Event]:
        events = []
        for chunk in chunks:
            events.append(Event(self._kind.sse_event_name(chunk), json.loads(chunk.to_json())))
            self._whole.accumulate(chunk)
        return events


def _said_in_chat(whole: dict[str, Any]) -> Said:
    message = whole["choices"][0]["message"] if whole["choices"] else {}
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return Said(message.get("content") or "", message.get("reasoning_content") or "", calls)


def _said_in_responses(whole: dict[str, Any]) -> Said:
    content, reasoning, calls = "", "", []
    for item in whole["output"]:
        text = "".join(part.get("text") or "" for part in item.get("content") or ())
        if item["type"] == "message":
            content += text
        elif item["type"] == "reasoning":
            reasoning += text
        elif item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
    return Said(content, reasoning, tuple(calls))


def _said_in_messages(whole: dict[str, Any]) -> Said:
    content, reasoning, calls = "", "", []
    for block in whole["content"]:
        if block["type"] == "text":
            content += block["text"]
        elif block["type"] == "thinking":
            reasoning += block["thinking"]
        elif block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
    return Said(content, reasoning, tuple(calls))


_SAID = {"chat": _said_in_chat, "responses": _said_in_responses, "messages": _said_in_messages}
