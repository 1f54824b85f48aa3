"""What the server adds to the package's events and responses: counts the engine knows last, and a field of its own.

The field `headrace`, beside those of the dialect, says what was used where a request left or was not given the choice.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.server.protocol.conversation import Turn
    from headrace.server.protocol.output import AnswerStream, Event


def about(turn: "Turn", result: Result) -> dict[str, Any]:
    """Return the field `headrace` of a response."""
    return {
        "thinking": turn.is_thinking,
        "reasoning_effort": turn.effort,
        "temperature": turn.params.temperature,
        "top_p": turn.params.top_p,
        "seed": result.seed,
        "stop": result.stop,
        "cache": cache_of(result),
        "numerics": result.numerics,
    }


def cache_of(result: Result) -> dict[str, Any]:
    """Return what the prefix cache did for an answer: tokens by tier, lineage, rows computed all the same."""
    return {
        "cached_tokens": result.usage.cached_tokens,
        "cached_tokens_by_tier": dict(result.usage.cached_tokens_by_tier),
        "lineage": "approximate" if result.is_approximate else "exact",
        "reencoded_rows": result.work.reencoded_rows,
        "replayed_rows": result.work.replayed_rows,
        "reason": result.cache_reason,
    }


@dataclass(frozen=True)
class Counts:
    """Tokens of a response: of the prompt, those of it that came from the cache, of all answers, of their reasoning."""

    prompt: int
    cached: int
    answer: int
    reasoning: int

    @classmethod
    def of(cls, answers: "Sequence[AnswerStream]") -> "Counts":
        """Count the answers to one prompt, all finished."""
        results = [one.result for one in answers if one.result is not None]
        return cls(
            prompt=results[0].usage.prompt_tokens,
            cached=results[0].usage.cached_tokens,
            answer=sum(result.usage.completion_tokens for result in results),
            reasoning=sum(one.reasoning_tokens for one in answers),
        )

    def chat(self) -> dict[str, Any]:
        """Return the usage of a chat completion."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        """Return the usage of a response."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.answer,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.answer,
        }

    def messages(self) -> dict[str, Any]:
        """Return the usage of a message; what came from the cache is not part of the input."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.answer,
            "service_tier": "standard",
        }


def chat_event(event: "Event", answer: "AnswerStream", choice: int) -> dict[str, Any]:
    """Return a chunk as choice number `choice` of its completion, without usage, with the log-probs of its text."""
    data = event.data
    data.pop("usage", None)
    for one in data["choices"]:
        one["index"] = choice
        delta = one["delta"]
        is_last = one["finish_reason"] is not None
        content = answer.logprobs.take_content() if delta.get("content") or is_last else []
        reasoning = answer.logprobs.take_reasoning() if delta.get("reasoning_content") or is_last else []
        one["logprobs"] = _chat_logprobs(content, reasoning)
    return data


def chat_choice(answer: "AnswerStream", choice: int) -> dict[str, Any]:
    """Return a finished answer as a choice of its completion."""
    found: dict[str, Any] = answer.whole["choices"][0]
    found["index"] = choice
    found["logprobs"] = _chat_logprobs(answer.logprobs.content, answer.logprobs.reasoning)
    return found


def _chat_logprobs(content: list[Any], reasoning: list[Any]) -> dict[str, Any] | None:
    if not content and not reasoning:
        return None
    found: dict[str, Any] = {"content": content, "refusal": None}
    return found | {"reasoning_content": reasoning} if reasoning else found


def message_event(event: "Event", turn: "Turn", answer: "AnswerStream") -> dict[str, Any]:
    """Return an event of a message; the last but one carries the final counts."""
    data, result = event.data, answer.result
    if data["type"] == "message_delta" and result is not None:
        data["usage"] = Counts.of([answer]).messages()
        data["delta"] |= _stop(data["delta"], result)
        data["headrace"] = about(turn, result)
    return data


def message(turn: "Turn", answer: "AnswerStream", result: Result) -> dict[str, Any]:
    """Return a finished message."""
    found = answer.whole
    return {
        **found,
        **_stop(found, result),
        "usage": Counts.of([answer]).messages(),
        "headrace": about(turn, result),
    }


def _stop(found: dict[str, Any], result: Result) -> dict[str, Any]:
    if isinstance(result.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop}
    return {"stop_reason": found["stop_reason"], "stop_sequence": None}


def response_event(event: "Event", answer: "AnswerStream", echo: dict[str, Any]) -> dict[str, Any]:
    """Return an event of a response; those that hold the response itself hold what was asked for too."""
    data = event.data
    if data["type"] == "response.output_text.delta":
        data["logprobs"] = answer.logprobs.take_content()
    elif data["type"] == "response.output_text.done":
        data["logprobs"] = answer.logprobs.content
    elif "part" in data:
        _fill_logprobs([data["part"]], answer)
    elif "item" in data:
        _fill_logprobs(data["item"].get("content") or [], answer)
    elif "response" in data:
        data["response"] = response(data["response"], answer, echo)
    return data


def response(found: dict[str, Any], answer: "AnswerStream", echo: dict[str, Any]) -> dict[str, Any]:
    """Return a response with its counts and what was asked for."""
    for item in found["output"]:
        _fill_logprobs(item.get("content") or [], answer)
    if answer.result is not None:
        found["usage"] = Counts.of([answer]).responses()
    return {**found, **echo}


def _fill_logprobs(parts: list[dict[str, Any]], answer: "AnswerStream") -> None:
    for part in parts:
        if part.get("type") == "output_text" and part.get("text"):
            part["logprobs"] = answer.logprobs.content
