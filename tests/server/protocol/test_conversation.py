"""Prompts are those of the encoding package, and the same whichever dialect asks."""

import itertools
import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from headrace.core.errors import UserError
from tests.server.protocol.nano import (
    CHAT_TOOLS,
    FOLDER,
    FORECAST,
    chat,
    messages,
    older,
    prompt_text,
    protocol,
    responses,
    shared,
    user,
)

ENCODINGS: dict[str, Any] = {"v4.1": recipe.DeepseekV41Encoding(), "v4": recipe.DeepseekV4Encoding()}
VERSIONS = {"v4.1": recipe.ModelVersion.DeepseekV41Flash, "v4": recipe.ModelVersion.DeepseekV4Pro}
PACKAGE_TOKENIZER = recipe.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CALL = {"id": "c1", "type": "function", "function": {"name": "get_forecast", "arguments": '{"city": "Ulm", "days": 2}'}}
OTHER = {**CALL, "id": "c2", "function": {"name": "get_forecast", "arguments": '{"city": "<think>水车"}'}}
ANSWER = {"role": "assistant", "content": "C1", "reasoning_content": "R1"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("hi 水车 👩‍👩‍👧")]},
    "marks in text": {"messages": [user("<｜User｜> <think> </think> ｜DSML｜ <｜end▁of▁sentence｜>")]},
    "system": {"messages": [{"role": "system", "content": "S"}, user("hi")]},
    "system in the middle": {"messages": [user("hi"), {"role": "system", "content": "S"}, user("ho")]},
    "several turns": {"messages": [user("hi"), ANSWER, user("more"), ANSWER, user("and more")]},
    "tools": {"messages": [user("hi"), ANSWER, user("more")], "tools": CHAT_TOOLS},
    "results": {
        "messages": [
            user("hi"),
            {**ANSWER, "tool_calls": [CALL, OTHER]},
            {"role": "tool", "tool_call_id": "c2", "content": "second"},
            {"role": "tool", "tool_call_id": "c1", "content": "first"},
            user("thanks"),
        ],
        "tools": CHAT_TOOLS,
    },
    "prefix": {"messages": [user("hi"), {"role": "assistant", "content": "Sure,", "prefix": True}]},
    "reminder": {"messages": [user("hi"), {"role": "latest_reminder", "content": "soon"}]},
    "schema": {
        "messages": [user("hi")],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
}


@pytest.mark.parametrize("encoding", ["v4.1", "v4"])
@pytest.mark.parametrize(("name", "effort"), list(itertools.product(CONVERSATIONS, ["none", "low", "max"])))
def test_ids_are_those_of_the_package(name: str, effort: str, encoding: str) -> None:
    body = CONVERSATIONS[name] | {"reasoning_effort": effort}
    options = recipe.ConversionOptions().with_model_alias("nano", VERSIONS[encoding])
    request = recipe.ChatCompletionRequest({"model": "nano", **body}).convert(options)
    expected = ENCODINGS[encoding].with_tokenizer(PACKAGE_TOKENIZER).encode(request.conversation)
    assert chat(body, {"v4.1": shared, "v4": older}[encoding]()).prompt_ids == expected


def three_ways(effort: Any) -> list[Any]:
    """Return one conversation with a call and its result in three dialects."""
    text = "What about Ulm?"
    thinking = [{"type": "thinking", "thinking": "R1", "signature": "s"}]
    in_chat = [
        {"role": "system", "content": "S"},
        user(text),
        {**ANSWER, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    in_responses = [
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "R1"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "C1", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_forecast", "arguments": CALL["function"]["arguments"]},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "get_forecast", "input": {"city": "Ulm", "days": 2}}
    in_messages = [
        user(text),
        {"role": "assistant", "content": [*thinking, {"type": "text", "text": "C1"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
    ]
    tool = {"name": "get_forecast", "description": "Tomorrow's weather", "input_schema": FORECAST["parameters"]}
    return [
        chat({"messages": in_chat, "tools": CHAT_TOOLS, "reasoning_effort": effort}),
        responses(
            {
                "instructions": "S",
                "input": in_responses,
                "tools": [{"type": "function", **FORECAST}],
                "reasoning": {"effort": effort},
            }
        ),
        messages({"system": "S", "messages": in_messages, "tools": [tool], "output_config": {"effort": effort}}),
    ]


@pytest.mark.parametrize("effort", ["none", "low", 33])
def test_three_dialects_give_one_prompt(effort: Any) -> None:
    first, second, third = three_ways(effort)
    assert first.prompt_ids == second.prompt_ids == third.prompt_ids
    assert prompt_text(first).endswith(
        "<tool_result>rain</tool_result><｜Assistant｜>" + ("</think>" if effort == "none" else "<think>")
    )


def test_a_forced_call_opens_the_block_in_three_dialects_and_switches_thinking_off() -> None:
    tools = [*CHAT_TOOLS, {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    blocks = [
        {"name": one["name"], "input_schema": one["parameters"]}
        | ({"description": one["description"]} if "description" in one else {})
        for one in flat
    ]
    named = {"type": "function", "function": {"name": "stop"}}
    for choices in (
        ("required", "required", {"type": "any"}),
        (named, {"type": "function", "name": "stop"}, {"type": "tool", "name": "stop"}),
    ):
        turns = [
            chat({"messages": [user("hi")], "tools": tools, "tool_choice": choices[0]}),
            responses({"input": "hi", "tools": flat, "tool_choice": choices[1]}),
            messages({"messages": [user("hi")], "tools": blocks, "tool_choice": choices[2]}),
        ]
        assert prompt_text(turns[0]).endswith("<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n")
        assert turns[0].prompt_ids == turns[1].prompt_ids == turns[2].prompt_ids
        specs = {turn.params.structured for turn in turns}
        assert len(specs) == 1
        assert all(turn.parsing().starts_in_tool_calls for turn in turns)


def test_a_developer_is_a_system_and_reasoning_has_several_names() -> None:
    system = chat({"messages": [{"role": "system", "content": "S"}, user("hi")]})
    assert chat({"messages": [{"role": "developer", "content": "S"}, user("hi")]}).prompt_ids == system.prompt_ids
    prompts = set()
    for name in ("reasoning_content", "reasoning", "reasoning_text"):
        answer = {"role": "assistant", "content": "C1", name: "R1", "refusal": None, "annotations": []}
        prompts.add(prompt_text(chat({"messages": [user("hi"), answer, user("ho")], "tools": CHAT_TOOLS})))
    assert len(prompts) == 1
    assert "<think>R1</think>C1" in prompts.pop()


@pytest.mark.parametrize("reasoning", [None, "", "R1", "absent"])
def test_reasoning_may_come_back_or_not(reasoning: Any) -> None:
    answer = {"role": "assistant", "content": "C1"} | (
        {} if reasoning == "absent" else {"reasoning_content": reasoning}
    )
    kept = prompt_text(chat({"messages": [user("hi"), answer, user("ho")], "tools": CHAT_TOOLS}))
    assert f"<think>{'R1' if reasoning == 'R1' else ''}</think>C1<｜end" in kept
    dropped = prompt_text(chat({"messages": [user("hi"), answer, user("ho")]}))
    assert "<｜Assistant｜></think>C1<｜end" in dropped


def test_a_last_answer_is_continued_where_that_is_asked_for() -> None:
    last = {"role": "assistant", "content": "Sure,"}
    turns = [
        chat({"messages": [user("hi"), last], "continue_final_message": True, "reasoning_effort": "none"}),
        chat({"messages": [user("hi"), {**last, "prefix": True}], "reasoning_effort": "none"}),
        messages({"messages": [user("hi"), last], "thinking": {"type": "disabled"}}),
    ]
    assert {prompt_text(turn) for turn in turns} == {"<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>Sure,"}
    with pytest.raises(UserError, match="continue_final_message goes with a last message of role assistant"):
        chat({"messages": [user("hi")], "continue_final_message": True})


def test_calls_are_followed_by_a_grammar_where_the_request_binds_them() -> None:
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    strict["parameters"] |= {"required": ["a"], "additionalProperties": False}
    body = {"messages": [user("hi")], "reasoning_effort": "none", "tools": CHAT_TOOLS}
    assert chat(body).params.structured is None
    for change in ({"tools": [{"type": "function", "function": strict}]}, {"parallel_tool_calls": False}):
        found = chat(body | change).params.structured
        assert (found.kind, found.after, found.is_optional) == ("tool_calls", ("｜DSML｜",), True)
        thinking = chat(body | change | {"reasoning_effort": "low"}).params.structured
        assert (thinking.after, thinking.is_optional) == (("</think>", "｜DSML｜"), True)
    forced = chat(body | {"tool_choice": "required", "parallel_tool_calls": False}).params.structured
    assert (forced.after, forced.is_optional, json.loads(forced.text)["is_parallel"]) == ((), False, False)


def test_json_begins_behind_the_reasoning_and_is_written_in_one_line() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$defs": {"a": True}, "$ref": "#/$defs/a"}}}
    found = chat({"messages": [user("hi")], "response_format": form}).params.structured
    assert (found.kind, found.after, found.is_optional) == ("json_schema", ("</think>",), False)
    assert json.loads(found.text)["x-guidance"]["whitespace_flexible"] is False
    flat = {"format": {"type": "json_schema", "name": "x", "schema": form["json_schema"]["schema"]}}
    others = [
        messages({"messages": [user("hi")], "output_config": {"format": {**flat["format"]}}}),
        responses({"input": "hi", "text": flat}),
    ]
    for other in others:
        assert other.params.structured == found
        assert other.prompt_ids == chat({"messages": [user("hi")], "response_format": form}).prompt_ids
    continued = {"role": "assistant", "content": "[", "prefix": True}
    begun = chat({"messages": [user("hi"), continued], "response_format": form}).params.structured
    assert begun.after == ()


def test_sampling_follows_thinking() -> None:
    on = chat({"messages": [user("hi")], "temperature": 0.2, "top_p": 0.5}).params
    assert (on.temperature, on.top_p) == (1.0, 0.95)
    off = chat({"messages": [user("hi")], "temperature": 0.2, "top_p": 0.5, "reasoning_effort": "none"}).params
    assert (off.temperature, off.top_p) == (0.2, 0.5)
    unsaid = chat({"messages": [user("hi")], "reasoning_effort": "none"}, protocol(default_temperature=0.7)).params
    assert (unsaid.temperature, unsaid.top_p) == (0.7, 1.0)


def test_answers_are_cut_at_the_context() -> None:
    free = chat({"messages": [user("hi")], "reasoning_effort": "none"})
    assert (free.resolve(100, 1 << 20), free.resolve(100, 1000)) == (8192, 900)
    assert chat({"messages": [user("hi")]}).resolve(100, 1 << 20) == 65_536
    assert chat({"messages": [user("hi")], "reasoning_effort": "max"}).resolve(100, 1 << 20) == 131_072
    asked = chat({"messages": [user("hi")], "max_tokens": 32_000})
    assert (asked.resolve(100, 1 << 20), asked.resolve(100, 16_384)) == (32_000, 16_284)
    with pytest.raises(UserError, match="the conversation has 1000 tokens; the model's context"):
        asked.resolve(1000, 1000)


HI = [user("hi")]
STRANGE_TOOL = {"type": "function", "function": {**FORECAST, "x": 1}}
STRANGE_PART = {"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}
FLAT = [{"name": "f", "input_schema": {"type": "object"}}]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"messages": []}, "Empty input messages"),
    (chat, {"messages": [{**user("hi"), "audio": {"id": "x"}}]}, r"messages\.0\.audio is not supported"),
    (chat, {"messages": [STRANGE_PART]}, r"content\.0\.b is not"),
    (chat, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    (chat, {"messages": [user("\ud800")]}, "half of a surrogate pair"),
    (chat, {"messages": HI, "tool_choice": "required"}, "there are no tools"),
    (chat, {"messages": HI, "tools": [STRANGE_TOOL]}, r"tools\.0\.function\.x"),
    (chat, {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": "required", "reasoning_effort": "low"}, "hinking mode"),
    (chat, {"messages": HI, "response_format": {"type": "json_object"}}, "json"),
    (chat, {"messages": HI, "n": 0}, "n is 0"),
    (chat, {"messages": HI, "seed": -1}, "seed|u64"),
    (chat, {"messages": HI, "stream_options": {}}, "stream: true"),
    (chat, {"messages": HI, "logit_bias": {"a": 1}}, "logit_bias names 'a'"),
    (responses, {"input": [{"type": "computer_call"}]}, "computer_call"),
    (responses, {"input": "hi", "tools": [{"type": "web_search"}]}, "web_search"),
    (responses, {"input": "hi", "include": ["file_search_call.results"]}, "file_search_call"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
    (messages, {"messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    (messages, {"messages": HI, "tool_choice": {"type": "any"}}, "there are no tools"),
    (
        messages,
        {"messages": HI, "tools": FLAT, "tool_choice": {"type": "tool", "name": "g"}},
        "'g', which is not among",
    ),
    (messages, {"messages": HI, "output_config": {"format": {"type": "text"}}}, "json_schema"),
]


@pytest.mark.parametrize(("read", "body", "words"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(read: Any, body: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        read(body)
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("name", ["functions", "audio", "modalities", "prediction", "web_search_options", "verbosity"])
def test_fields_of_the_dialect_that_are_not_supported_are_no_fields_here(name: str) -> None:
    with pytest.raises(ValueError, match="extra_forbidden"):
        chat({"messages": [user("hi")], name: "x"})


@pytest.mark.parametrize("field", [{"tool_choice": "sometimes"}, {"reasoning_effort": 75.0}, {"temperature": "1"}])
def test_values_of_another_kind_are_refused_by_the_field_s_name(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        chat({"messages": [user("hi")], "tools": CHAT_TOOLS, **field})
