"""Answers as the engine tells them, made of text: tokens of headrace-nano's vocabulary, text as it becomes certain."""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.engine.core.events import TokenEvent
from headrace.engine.result import FinishReason, Result, Usage
from headrace.server.protocol.conversation import Turn
from headrace.server.protocol.output import AnswerStream, Event
from headrace.server.protocol.segments import MARKER
from headrace.text.detokenize import Detokenizer
from headrace.text.stops import StopChecker
from tests.server.protocol.nano import TOKENIZER, shared

EOS = 1
TOKENS = shared().tokens


def ids_of(text: str) -> list[int]:
    """Return ids in which think marks and call markers are tokens of their own."""
    for mark in ("<think>", "</think>", MARKER):
        if mark in text:
            before, _, after = text.partition(mark)
            return [*ids_of(before), TOKENS.special(mark), *ids_of(after)]
    return TOKENS.plain(text)


def engine_events(
    ids: Sequence[int], *, reason: FinishReason = "stop", stop: Sequence[str] = (), prompt_tokens: int = 10
) -> list[TokenEvent]:
    """Return what the engine tells of an answer."""
    detokenizer, stops = Detokenizer(TOKENIZER, skip_special_tokens=True), StopChecker(stop)
    events: list[TokenEvent] = []
    whole = ""
    for index, token_id in enumerate(ids):
        is_last = index == len(ids) - 1
        piece = "" if token_id == EOS else detokenizer.push(token_id)
        piece += detokenizer.flush() if is_last else ""
        piece, has_stopped = stops.push(piece)
        if is_last and not has_stopped:
            piece += stops.flush()
        whole += piece
        result = None
        if is_last or has_stopped:
            result = Result(
                text=whole,
                token_ids=list(ids[: index + 1]),
                logprobs=None,
                finish_reason="stop" if has_stopped else reason,
                usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=index + 1, cached_tokens=4),
                seed=7,
                stop=stops.matched,
            )
        events.append(TokenEvent(request_id="r", choice=0, token_id=token_id, text=piece, result=result))
        if has_stopped:
            break
    return events


def texts(pieces: Iterable[str], reason: FinishReason = "stop") -> list[TokenEvent]:
    """Return events whose texts are cut as given, whatever tokens that would be."""
    pieces = list(pieces)
    result = Result(
        text="".join(pieces),
        token_ids=[5] * len(pieces),
        logprobs=None,
        finish_reason=reason,
        usage=Usage(prompt_tokens=10, completion_tokens=len(pieces)),
        seed=7,
    )
    return [
        TokenEvent(request_id="r", choice=0, token_id=5, text=piece, result=result if last else None)
        for piece, last in zip(pieces, [False] * (len(pieces) - 1) + [True], strict=True)
    ]


def told(turn: Turn, events: Iterable[TokenEvent]) -> tuple[list[Event], AnswerStream]:
    """Return the events of a dialect that an answer becomes, and the answer."""
    answer = AnswerStream(turn, "id1", "nano", 1)
    found = answer.begin(10)
    for event in events:
        found += answer.take(event, TOKENS, TOKENIZER)
    return found, answer


def chat_deltas(events: Iterable[Event]) -> dict[str, Any]:
    """Return what a client of chat completions puts together."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for event in events:
        choice = event.data["choices"][0]
        delta = choice["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                found["calls"].append([call["function"]["name"], ""])
            found["calls"][call["index"]][1] += call["function"]["arguments"]
        found["reason"] = choice["finish_reason"] or found["reason"]
    return found
