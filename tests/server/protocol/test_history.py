"""A conversation that comes back, written another way, has the tokens it was generated with."""

import json
from typing import Any

import pytest

from headrace.server.protocol.history import History, RawTurn, Said, canonical_arguments, key_of_answer
from tests.server.protocol.answers import EOS, TOKENS, engine_events, ids_of, told
from tests.server.protocol.nano import CHAT_TOOLS, chat, protocol, responses, user

MARK = "｜DSML｜"
CALLS = (
    f'\n\n<{MARK} calls>\n<{MARK} invoke name="get_forecast">\n'
    f'<{MARK} parameter name="days" string="false"> 2 </{MARK} parameter>\n'
    f'<{MARK} parameter name="city" string="true">Ulm</{MARK} parameter>\n'
    f"</{MARK} invoke>\n</{MARK} calls>"
)
REWRITTEN = {
    "id": "other",
    "type": "function",
    "function": {"name": "get_forecast", "arguments": '{"city":"Ulm","days":2}'},
}
RESULT = {"role": "tool", "tool_call_id": "other", "content": "rain"}


def odd_ids(text: str) -> list[int]:
    """Return ids that the tokenizer would not choose: characters one by one."""
    return [
        token_id
        for part in text.split(MARK)
        for token_id in [*(i for c in part for i in TOKENS.plain(c)), TOKENS.marker]
    ][:-1]


def ended(turn: Any, ids: list[int], where: Any, salt: str | None = None, **more: Any) -> Said:
    events = engine_events([*ids, EOS], **more)
    _, answer = told(turn, events)
    result = events[-1].result
    assert result is not None
    said = answer.said()
    where.history.put(key_of_answer(salt, turn.conversation.messages, said), answer.raw(result, TOKENS))
    return said


def test_rewritten_arguments_get_the_tokens_that_were_generated() -> None:
    where = protocol()
    body = {"messages": [user("hi")], "tools": CHAT_TOOLS, "reasoning_effort": "none"}
    first = chat(body, where)
    generated = odd_ids("Well," + CALLS)
    said = ended(first, generated, where)
    assert [(name, json.loads(given)) for name, given in said.calls] == [("get_forecast", {"days": 2, "city": "Ulm"})]
    answer = {"role": "assistant", "content": "Well,", "tool_calls": [REWRITTEN]}
    second = chat({**body, "messages": [user("hi"), answer, RESULT]}, where)
    assert second.prompt_ids[: len(first.prompt_ids) + len(generated)] == first.prompt_ids + generated
    fresh = chat({**body, "messages": [user("hi"), answer, RESULT]}, protocol())
    assert fresh.prompt_ids != second.prompt_ids
    assert fresh.prompt_ids[-6:] == second.prompt_ids[-6:]


def rewritten(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{**REWRITTEN, "function": {"name": "get_forecast", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        ({}, True),
        ({"content": "Well"}, False),
        (rewritten('{"city":"Ulm","days":3}'), False),
        (rewritten(' { "days" : 2 , "city" : "\\u0055lm" } '), True),
    ],
)
def test_only_an_answer_that_means_the_same_is_replaced(change: dict[str, Any], is_known: bool) -> None:
    where = protocol()
    body = {"messages": [user("hi")], "tools": CHAT_TOOLS, "reasoning_effort": "none"}
    generated = odd_ids("Well," + CALLS)
    ended(chat(body, where), generated, where)
    answer = {"role": "assistant", "content": "Well,", "tool_calls": [REWRITTEN]} | change
    ids = chat({**body, "messages": [user("hi"), answer, RESULT]}, where).prompt_ids
    assert (generated == ids[len(chat(body).prompt_ids) :][: len(generated)]) == is_known
    other_start = chat({**body, "messages": [user("ho"), answer, RESULT]}, where).prompt_ids
    assert generated != other_start[len(chat(body).prompt_ids) :][: len(generated)]


def test_dropped_reasoning_leaves_the_content_s_tokens() -> None:
    where = protocol()
    body = {"messages": [user("hi")]}
    ended(chat(body, where), [*odd_ids("because so"), TOKENS.think_end, *odd_ids("Yes indeed")], where)
    answer = {"role": "assistant", "content": "Yes indeed", "reasoning_content": "because so"}
    ids = chat({"messages": [user("hi"), answer, user("more")]}, where).prompt_ids
    part = [TOKENS.assistant, TOKENS.think_end, *odd_ids("Yes indeed"), EOS]
    assert str(part)[1:-1] in str(ids)


@pytest.mark.parametrize("reasoning", ["because so", "because not", None])
def test_kept_reasoning_has_its_tokens_where_it_came_back_unchanged(reasoning: str | None) -> None:
    where = protocol()
    body = {"messages": [user("hi")], "tools": CHAT_TOOLS}
    ended(chat(body, where), [*odd_ids("because so"), TOKENS.think_end, *odd_ids("Yes indeed")], where)
    answer = {"role": "assistant", "content": "Yes indeed", "reasoning_content": reasoning}
    ids = chat({**body, "messages": [user("hi"), answer, user("more")]}, where).prompt_ids
    kept = odd_ids("because so") if reasoning == "because so" else TOKENS.plain(reasoning or "")
    part = [TOKENS.think, *kept, TOKENS.think_end, *odd_ids("Yes indeed"), EOS]
    assert str(part)[1:-1] in str(ids)


def test_tenants_know_nothing_of_each_other() -> None:
    where = protocol()
    body = {"messages": [user("hi")], "reasoning_effort": "none"}
    ended(chat(body, where, "a"), odd_ids("Yes indeed"), where, "a")
    again = {**body, "messages": [user("hi"), {"role": "assistant", "content": "Yes indeed"}, user("more")]}
    assert chat(again, where, "a").prompt_ids != chat(again, where, "b").prompt_ids
    assert chat(again, where, "b").prompt_ids == chat(again, protocol()).prompt_ids


def test_an_answer_is_known_in_another_dialect() -> None:
    where = protocol()
    ended(chat({"messages": [user("hi")], "reasoning_effort": "none"}, where), odd_ids("Yes indeed"), where)
    items = [
        user("hi"),
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes indeed"}]},
        user("more"),
    ]
    ids = responses({"input": items, "reasoning": {"effort": "none"}}, where).prompt_ids
    assert str(odd_ids("Yes indeed"))[1:-1] in str(ids)


def test_a_stop_string_cuts_the_tokens_that_are_kept() -> None:
    where = protocol()
    body = {"messages": [user("hi")], "reasoning_effort": "none"}
    turn = chat(body, where)
    ids = ids_of("水车 turns<END>more")
    events = engine_events([*ids, EOS], stop=["<END>"])
    _, answer = told(turn, events)
    kept = answer.raw(events[-1].result, TOKENS)
    assert TOKENS.text(list(kept.content_ids)) == "水车 turns"


def test_the_oldest_answers_go_first_and_none_is_counted_twice() -> None:
    history = History(max_answers=3, max_tokens=10)
    for name in (b"a", b"b", b"c"):
        history.put(name, RawTurn("", (), (1, 2)))
    assert history.get(b"a") is not None
    history.put(b"d", RawTurn("", (), (1, 2)))
    assert [history.get(name) is None for name in (b"a", b"b", b"c", b"d")] == [False, True, False, False]
    history.put(b"d", RawTurn("", (1,) * 4, (1,) * 5))
    assert [history.get(name) is None for name in (b"a", b"c", b"d")] == [True, True, False]
    history.put(b"e", RawTurn("", (), (1,) * 11))
    assert len(history) == 0


@pytest.mark.parametrize(("one", "other"), [('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'), ('"\\u0055"', '"U"')])
def test_arguments_have_one_spelling(one: str, other: str) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)
    assert canonical_arguments("no json") == "no json"
