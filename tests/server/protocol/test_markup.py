"""Tool calls through the parser, cut anywhere, with arguments that look like markup, and markup that is broken."""

import json
import random
from typing import Any

import pytest

from headrace.server.protocol.markup import PRIVATE, Markup
from tests.server.protocol.answers import chat_deltas, engine_events, ids_of, texts, told
from tests.server.protocol.nano import CHAT_TOOLS, chat, messages, responses, user

MARK = "｜DSML｜"
HOSTILE = [
    "plain",
    "",
    'quotes " and \\" and \\\\ and \' back\\slash',
    "a\nb\r\n\tc \n",
    f"</{MARK}parameter> </{MARK}_parameter> </{MARK} parameterX> </{MARK}",
    f'</parameter> </{MARK} invoke> </{MARK} calls> <{MARK} invoke name="g">',
    f'<{MARK} parameter name="x" string="true">nested',
    "<｜User｜> <think></think> ｜ | < </ <| 2>&1 && a<b",
    "emoji 👩‍👩‍👧‍👦 é 水车 \u2028 Ж",
    '{"json": [1, 2, {"a": null}]}',
]


def call(name: str, parameters: dict[str, Any], space: str = " ") -> str:
    parts = []
    for key, value in parameters.items():
        is_text = "true" if isinstance(value, str) else "false"
        written = value if isinstance(value, str) else json.dumps(value)
        parts.append(f'<{MARK}{space}parameter name="{key}" string="{is_text}">{written}</{MARK}{space}parameter>\n')
    return f'<{MARK}{space}invoke name="{name}">\n{"".join(parts)}</{MARK}{space}invoke>\n'


def block(*calls: str, space: str = " ") -> str:
    name = " calls" if space else "tool_calls"
    return f"\n\n<{MARK}{name}>\n{''.join(calls)}</{MARK}{name}>"


def turn() -> Any:
    return chat({"messages": [user("hi")], "tools": CHAT_TOOLS, "reasoning_effort": "none"})


def read(pieces: list[str]) -> dict[str, Any]:
    return chat_deltas(told(turn(), texts(pieces))[0])


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("space", [" ", ""])
def test_hostile_arguments_arrive_as_they_were_written(text: str, space: str) -> None:
    if not space:
        text = text.replace(f"</{MARK}parameter>", f"</{MARK} parameter>")  # the exact closing tag does close
    arguments = {"city": text, "days": 3}
    found = read(["Well,", block(call("get_forecast", arguments, space), space=space)])
    assert found["content"] == "Well,"
    assert [(name, json.loads(given)) for name, given in found["calls"]] == [("get_forecast", arguments)]
    assert found["reason"] == "tool_calls"


def test_every_cut_in_two_gives_the_same_call() -> None:
    arguments = {"city": HOSTILE[4] + HOSTILE[2] + "👩‍👧\n", "days": {"a": [1, "</"]}}
    text = "Hm" + block(call("get_forecast", arguments), call("get_forecast", {"city": "<"}))
    whole = read([text])
    assert json.loads(whole["calls"][0][1]) == arguments
    assert whole["calls"][1] == ["get_forecast", '{"city": "<"}']
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]]) == whole, text[:place]


def test_every_cut_between_bytes_gives_the_same_call() -> None:
    """Tokens may end inside characters; the engine's text does not."""
    text = block(call("get_forecast", {"city": "水车 👩‍👧 é", "days": 1}))
    whole = read([text])
    for seed in range(20):
        draw = random.Random(seed)
        data, pieces, held = text.encode(), [], b""
        while data:
            size = draw.randint(1, 4)
            held, data = held + data[:size], data[size:]
            certain = held.decode(errors="ignore")
            pieces.append(certain)
            held = held[len(certain.encode()) :]
        assert read(pieces) == whole


def test_single_characters_give_the_same_call_in_every_dialect() -> None:
    arguments = {"city": HOSTILE[5], "days": 12}
    text = block(call("get_forecast", arguments))
    tool = {"name": "get_forecast", "input_schema": CHAT_TOOLS[0]["function"]["parameters"]}
    flat = {"type": "function", **CHAT_TOOLS[0]["function"]}
    turns = [
        turn(),
        responses({"input": "hi", "tools": [flat], "reasoning": {"effort": "none"}}),
        messages({"messages": [user("hi")], "tools": [tool], "thinking": {"type": "disabled"}}),
    ]
    for one in turns:
        said = told(one, texts(text))[1].said()
        assert [(name, json.loads(given)) for name, given in said.calls] == [("get_forecast", arguments)]
        assert said.content == ""


BROKEN = [
    f"a <{MARK} cal",
    f"a <{MARK} calls>\n",
    f"a <{MARK} calls>\nno call",
    f"a <{MARK} calls>\n<{MARK} invoke nam",
    f"a <{MARK} thing> b </{MARK} calls> c",
    f"a {MARK} b",
    f"a <{MARK}",
    'a <|DSML| calls>\n<|DSML| invoke name="f">',
    f"a <{MARK} calls>\n<{MARK} calls>\n<{MARK} calls>",
]


@pytest.mark.parametrize("text", BROKEN)
def test_broken_markup_stays_text(text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces)
        assert found["content"] == text
        assert found["calls"] == []
        assert found["reason"] == "stop"


@pytest.mark.parametrize("name", ["calls", "callz", "tool_calls", "function_calls"])
def test_a_block_of_another_name_is_read_by_its_calls(name: str) -> None:
    text = f"<{MARK} {name}>\n" + call("get_forecast", {"city": "Ulm"}) + f"</{MARK} {name}>"
    assert read(list(text))["calls"] == [["get_forecast", '{"city": "Ulm"}']]


def test_a_broken_opening_does_not_hide_the_call_behind_it() -> None:
    found = read([f"see <{MARK} x and", block(call("get_forecast", {"city": "Ulm"}))])
    assert found["content"] == f"see <{MARK} x and"
    assert found["calls"] == [["get_forecast", '{"city": "Ulm"}']]


def test_what_is_no_json_ends_with_its_parameter() -> None:
    number = f'<{MARK} parameter name="days" string="false">Пять</{MARK} parameter>\n'
    city = f'<{MARK} parameter name="city" string="true">Ulm</{MARK} parameter>\n'
    text = f'<{MARK} calls>\n<{MARK} invoke name="f">\n{number}{city}</{MARK} invoke>\n</{MARK} calls>'
    assert read(list(text))["calls"] == [["f", '{"days": Пять, "city": "Ulm"}']]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_markup_in_reasoning_is_reasoning(size: int) -> None:
    thinking = chat({"messages": [user("hi")], "tools": CHAT_TOOLS})
    inside = "I write" + block(call("get_forecast", {"city": "Rome"})) + "so "
    text = inside + "</think>" + block(call("get_forecast", {"city": "Ulm"}))
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    found = chat_deltas(told(thinking, texts(pieces))[0])
    assert found["reasoning"] == inside
    assert found["calls"] == [["get_forecast", '{"city": "Ulm"}']]


FRAGMENTS = [
    f"<{MARK}",
    f"</{MARK}",
    MARK,
    " calls>\n",
    "tool_calls>",
    ' invoke name="f">\n',
    ' invoke name="',
    'invoke name="">',
    ' parameter name="a" string="true">',
    'parameter name="b" string="false">',
    ' parameter name="c">',
    " parameter>\n",
    " invoke>\n",
    ">",
    "<",
    "\n\n",
    "text",
    "</think>",
    '{"x": 1}',
    "水",
]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_no_mixture_of_markup_shows_the_private_marker(dialect: str) -> None:
    flat = {"type": "function", **CHAT_TOOLS[0]["function"]}
    tool = {"name": "get_forecast", "input_schema": CHAT_TOOLS[0]["function"]["parameters"]}
    for effort in ("none", "low"):
        one = {
            "chat": lambda effort=effort: chat(
                {"messages": [user("hi")], "tools": CHAT_TOOLS, "reasoning_effort": effort}
            ),
            "responses": lambda effort=effort: responses(
                {"input": "hi", "tools": [flat], "reasoning": {"effort": effort}}
            ),
            "messages": lambda effort=effort: messages(
                {"messages": [user("hi")], "tools": [tool], "output_config": {"effort": effort}}
            ),
        }[dialect]()
        for seed in range(150):
            draw = random.Random(seed)
            pieces = draw.choices(FRAGMENTS, k=draw.randint(1, 14))
            events, answer = told(one, texts(pieces))
            shown = json.dumps([event.data for event in events] + [answer.whole], ensure_ascii=False)
            assert PRIVATE not in shown, pieces
            assert "\ufdd0" not in shown, pieces


def test_no_mixture_without_a_call_loses_text() -> None:
    """But for line ends it begins with and a stray end of reasoning, which the parser takes out."""
    num_texts = 0
    for seed in range(600):
        draw = random.Random(seed)
        pieces = draw.choices(FRAGMENTS, k=draw.randint(1, 14))
        found = read(pieces)
        if not found["calls"]:
            num_texts += 1
            text = "".join(pieces).replace("</think>", "")
            assert found["content"].lstrip("\n") == text.lstrip("\n")
    assert num_texts > 300


def test_arguments_stream_as_they_form() -> None:
    text = block(call("get_forecast", {"city": "a long name of a city"}))
    events, _ = told(turn(), engine_events([*ids_of(text), 1]))
    fragments = [
        one["function"]["arguments"]
        for event in events
        for one in event.data["choices"][0]["delta"].get("tool_calls") or ()
    ]
    assert len(fragments) > 8
    assert json.loads("".join(fragments)) == {"city": "a long name of a city"}


def test_plain_text_is_passed_on_at_once() -> None:
    markup = Markup()
    assert [markup.push(piece) for piece in ("Hello", " <b>", "<", "x <", f"{MARK[:3]}", "!")] == [
        "Hello",
        " <b>",
        "",
        "<x ",
        "",
        f"<{MARK[:3]}!",
    ]


def test_the_marker_of_the_parser_is_not_the_model_s() -> None:
    assert PRIVATE != MARK
    text = f"<{MARK} calls>\n" + call("f", {})
    assert PRIVATE in Markup().push(text)
