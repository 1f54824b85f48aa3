"""One conversation in three dialects, by official clients: the same prompt and tokens; six turns of tools."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.clients import (
    CHAT_TOOL,
    FLAT_TOOL,
    MESSAGES_TOOL,
    MODEL,
    OFF,
    WHEEL,
    anthropic_of,
    check_wheel,
    openai_of,
    rewritten,
    user,
)
from tests.server.serving import Served

TURNS = 6


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 9}])
def test_three_dialects_give_the_same_tokens(served: Served, sampling: dict[str, Any]) -> None:
    with openai_of(served) as openai, anthropic_of(served) as anthropic:
        compare(openai, anthropic, sampling)


def compare(openai: Any, anthropic: Any, sampling: dict[str, Any]) -> None:
    system, texts = "Be brief.", ["def read(", "path):", "go on"]
    more = {"seed": 0, **sampling}
    chat = openai.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": system},
            user(texts[0]),
            {"role": "assistant", "content": texts[1]},
            user(texts[2]),
        ],
        reasoning_effort=OFF,
        max_tokens=8,
        **more,
    )
    response = openai.responses.create(
        model=MODEL,
        instructions=system,
        input=[user(texts[0]), {"role": "assistant", "content": texts[1]}, user(texts[2])],
        reasoning={"effort": "none"},
        max_output_tokens=8,
        temperature=more["temperature"],
        extra_body={"seed": more["seed"]},
    )
    message = anthropic.messages.create(
        model=MODEL,
        system=system,
        messages=[user(texts[0]), {"role": "assistant", "content": texts[1]}, user(texts[2])],
        max_tokens=8,
        thinking={"type": "disabled"},
        extra_body=more,
    )
    assert chat.choices[0].message.content == response.output_text == message.content[0].text
    read = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert chat.usage.prompt_tokens == response.usage.input_tokens == read
    assert chat.usage.completion_tokens == response.usage.output_tokens == message.usage.output_tokens
    counted = anthropic.messages.count_tokens(
        model=MODEL,
        system=system,
        messages=[user(texts[0]), {"role": "assistant", "content": texts[1]}, user(texts[2])],
        thinking={"type": "disabled"},
    )
    assert counted.input_tokens == read


def in_chat(client: Any) -> int:
    messages: list[Any] = [user("Turn the wheel.")]
    before = 0
    for turn in range(TURNS):
        found = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[CHAT_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=turn,
            max_tokens=200,
        )
        (call,) = found.choices[0].message.tool_calls
        check_wheel(call.function.arguments)
        if turn:  # all of the last prompt and answer but what stands in an unfinished entry
            assert found.usage.prompt_tokens_details.cached_tokens >= before - 2
        before = found.usage.prompt_tokens + found.usage.completion_tokens
        back = {
            **call.model_dump(),
            "function": {"name": WHEEL["name"], "arguments": rewritten(call.function.arguments)},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [back]},
            {"role": "tool", "tool_call_id": call.id, "content": f"turned {turn}"},
        ]
    return before


def in_responses(client: Any) -> int:
    items: list[Any] = [user("Turn the wheel, please.")]
    last: str | None = None
    before = 0
    for turn in range(TURNS):
        found = client.responses.create(
            model=MODEL,
            input=items,
            previous_response_id=last,
            tools=[FLAT_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=200,
            extra_body={"seed": turn},
        )
        (call,) = found.output
        assert call.type == "function_call"
        check_wheel(call.arguments)
        assert not turn or found.usage.input_tokens_details.cached_tokens >= before - 2
        before = found.usage.input_tokens + found.usage.output_tokens
        last = found.id
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": f"turned {turn}"}]
    return before


def in_messages(client: Any) -> int:
    messages: list[Any] = [user("Turn the wheel now.")]
    before = 0
    for turn in range(TURNS):
        with client.messages.stream(
            model=MODEL,
            messages=messages,
            tools=[MESSAGES_TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=200,
            extra_body={"seed": turn},
        ) as stream:
            found = stream.get_final_message()
        (call,) = found.content
        assert (call.type, found.stop_reason) == ("tool_use", "tool_use")
        arguments = check_wheel(call.input)
        assert not turn or found.usage.cache_read_input_tokens >= before - 2
        before = found.usage.input_tokens + found.usage.cache_read_input_tokens + found.usage.output_tokens
        use = {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(reversed(arguments.items()))}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"turned": turn})}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return before


def test_six_turns_of_tools_read_from_the_cache_what_was_generated(served: Served) -> None:
    """In chat with rewritten arguments, in responses from the last response on, in messages streamed; all at once."""
    with ThreadPoolExecutor(3) as pool, openai_of(served) as openai, anthropic_of(served) as anthropic:
        loops = [pool.submit(in_chat, openai), pool.submit(in_responses, openai), pool.submit(in_messages, anthropic)]
        lengths = [loop.result() for loop in loops]
    assert min(lengths) > 600
