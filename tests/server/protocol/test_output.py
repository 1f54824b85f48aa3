"""Answers become the events of their dialect: in order, whole characters, with their counts."""

import json
from typing import Any

import pytest

from headrace.server.protocol.patches import Counts, chat_event, message, message_event, response_event
from tests.server.protocol.answers import EOS, chat_deltas, engine_events, ids_of, told
from tests.server.protocol.nano import CHAT_TOOLS, chat, messages, responses, user

HI = [user("hi")]
PLAIN = {"messages": HI, "reasoning_effort": "none"}
EMOJI = "hi 👩‍👩‍👧 水车 é!"


def from_text(turn: Any, text: str, **more: Any) -> Any:
    return told(turn, engine_events([*ids_of(text), EOS], **more))


def test_characters_come_whole_though_their_bytes_are_tokens() -> None:
    assert len(ids_of("😀")) == 4
    events, _ = from_text(chat(PLAIN), EMOJI)
    pieces = [event.data["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 5


def test_a_character_that_never_ends_is_one_replacement_at_the_end() -> None:
    events, _ = told(chat(PLAIN), engine_events(ids_of("ab 😀")[:-1], reason="length"))
    found = chat_deltas(events)
    assert (found["content"], found["reason"]) == ("ab \ufffd", "length")


@pytest.mark.parametrize("text", ["banana<END>apple", "水车<END>苹果", "水<EN<END>x", "a<E<END>"])
@pytest.mark.parametrize("stops", [["<END>"], ["<EN", "<END>"][1:], ["<END>", "<ENDE"]])
def test_a_stop_string_is_found_across_tokens_and_right_after_chinese(text: str, stops: list[str]) -> None:
    events, answer = from_text(chat(PLAIN), text, stop=stops)
    found = chat_deltas(events)
    assert (found["content"], found["reason"]) == (text.partition("<END>")[0], "stop")
    assert answer.whole["choices"][0]["message"]["content"] == found["content"]


def test_reasoning_comes_before_content_and_a_stop_string_ends_it_too() -> None:
    events, answer = from_text(chat({"messages": HI}), "think 水车 hard</think>Yes.")
    found = chat_deltas(events)
    assert (found["reasoning"], found["content"], found["reason"]) == ("think 水车 hard", "Yes.", "stop")
    assert answer.reasoning_tokens == len(ids_of("think 水车 hard"))
    found = chat_deltas(from_text(chat({"messages": HI}), "think 水车<END>hard</think>Yes.", stop=["<END>"])[0])
    assert (found["reasoning"], found["content"], found["reason"]) == ("think 水车", "", "stop")


def test_every_chat_stream_has_one_role_first_and_one_reason_last() -> None:
    for body, text in ((PLAIN, "x"), ({"messages": HI}, "r</think>c"), ({"messages": HI}, "never ends")):
        events, answer = from_text(chat(body), text)
        data = [chat_event(event, answer, 3)["choices"][0] for event in events]
        assert [("role" in one["delta"]) for one in data] == [True] + [False] * (len(data) - 1)
        assert [one["finish_reason"] for one in data] == [None] * (len(data) - 1) + ["stop"]
        assert {one["index"] for one in data} == {3}


def test_events_of_messages_open_and_close_their_blocks() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    turn = messages({"messages": HI, "tools": [tool]})
    mark = "｜DSML｜"
    calls = f'<{mark} calls>\n<{mark} invoke name="f">\n</{mark} invoke>\n</{mark} calls>'
    events, answer = from_text(turn, f"R</think>C\n\n{calls}")
    data = [message_event(event, turn, answer) for event in events]
    assert [event.name for event in events] == [one["type"] for one in data]
    opened: list[str] = []
    for one in data:
        if one["type"] == "content_block_start":
            opened.append(one["content_block"]["type"])
            assert one["index"] == len(opened) - 1
        elif one["type"].startswith("content_block"):
            assert one["index"] == len(opened) - 1
    assert opened == ["thinking", "text", "tool_use"]
    assert [one["type"] for one in data if one["type"] != "ping"][:: len(data) - 2] == ["message_start", "message_stop"]
    assert data[-2]["delta"]["stop_reason"] == "tool_use"
    assert data[-2]["usage"]["cache_read_input_tokens"] == 4
    assert data[-2]["usage"]["input_tokens"] == 6


def test_a_stop_string_of_messages_is_named() -> None:
    turn = messages({"messages": HI, "thinking": {"type": "disabled"}, "stop_sequences": ["<END>"]})
    events, answer = from_text(turn, "水车<END>x", stop=["<END>"])
    assert answer.result is not None
    found = message(turn, answer, answer.result)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "<END>")
    assert found["content"] == [{"type": "text", "text": "水车"}]
    delta = message_event(events[-2], turn, answer)
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "<END>"}


def test_events_of_responses_are_numbered_and_close_what_they_open() -> None:
    turn = responses({"input": "hi", "tools": [{"type": "function", **CHAT_TOOLS[0]["function"]}]})
    mark = "｜DSML｜"
    calls = f'<{mark} calls>\n<{mark} invoke name="get_forecast">\n</{mark} invoke>\n</{mark} calls>'
    events, answer = from_text(turn, f"R</think>C\n\n{calls}")
    data = [response_event(event, answer, {"store": True}) for event in events]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    added = [one["output_index"] for one in data if one["type"] == "response.output_item.added"]
    done = [one["output_index"] for one in data if one["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2]
    last = data[-1]["response"]
    assert (data[-1]["type"], last["status"], last["store"]) == ("response.completed", "completed", True)
    assert (
        last["usage"]
        == Counts(prompt=10, cached=4, answer=answer.result.usage.completion_tokens, reasoning=1).responses()
    )
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]


def test_an_answer_that_is_cut_closes_what_is_open() -> None:
    turn = responses({"input": "hi"})
    events, answer = told(turn, engine_events([*ids_of("some reasoning"), EOS])[:2])
    events += answer.cut(10)
    kinds = [event.data["type"] for event in events]
    assert kinds[-4:] == [
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert json.loads(json.dumps(answer.whole))["output"][0]["content"][0]["text"] != ""
