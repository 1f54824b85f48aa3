"""Responses through OpenAI's client and a real server: streams, kept responses, cancellation."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients import FLAT_TOOL, MODEL, openai_of
from tests.server.serving import Served, serving

NO_THINKING: Any = {"effort": "none"}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_of(served) as found:
        yield found


def create(client: openai.OpenAI, text: Any = "import os", **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, **{"max_output_tokens": 6, **more})


def test_a_stream_adds_up_to_the_whole_and_to_what_is_kept(client: openai.OpenAI) -> None:
    one = create(client, reasoning=NO_THINKING, temperature=0)
    events = list(create(client, reasoning=NO_THINKING, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == one.output_text
    last = events[-1].response
    assert (last.status, last.output_text, last.usage.output_tokens) == (one.status, one.output_text, 6)
    assert last.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(last.id) == last
    assert client.responses.retrieve(one.id).output_text == one.output_text


def test_reasoning_has_events_of_its_own_and_effort_is_told(client: openai.OpenAI) -> None:
    events = list(create(client, reasoning={"effort": 42}, stream=True))
    kinds = [event.type for event in events]
    assert "response.reasoning_text.delta" in kinds
    assert "response.output_text.delta" not in kinds
    assert events[-1].response.headrace["reasoning_effort"] == 42
    assert events[-1].response.reasoning.effort == 42
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 6


def test_log_probs_stand_beside_their_text(client: openai.OpenAI) -> None:
    asked = {"reasoning": NO_THINKING, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    part = create(client, **asked).output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = list(create(client, stream=True, **asked))
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in part.logprobs]


def test_a_conversation_goes_on_from_a_kept_response(client: openai.OpenAI) -> None:
    first = create(client, reasoning=NO_THINKING)
    second = create(client, "and then", reasoning=NO_THINKING, previous_response_id=first.id)
    spelled = [
        {"role": "user", "content": "import os"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then"},
    ]
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens == create(client, spelled, reasoning=NO_THINKING).usage.input_tokens
    third = create(client, "and", reasoning=NO_THINKING, previous_response_id=second.id, store=False)
    assert third.usage.input_tokens > second.usage.input_tokens
    for missing in (third.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            create(client, "x", previous_response_id=missing)


def test_a_response_can_be_forgotten(client: openai.OpenAI) -> None:
    one = create(client, reasoning=NO_THINKING, max_output_tokens=1, metadata={"a": "b"})
    assert client.responses.retrieve(one.id).metadata == {"a": "b"}
    client.responses.delete(one.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(one.id)


def test_a_response_is_cancelled_while_it_is_generated(client: openai.OpenAI) -> None:
    began = time.monotonic()
    events: list[Any] = []
    for event in create(client, reasoning=NO_THINKING, stream=True, max_output_tokens=2000, temperature=1.2):
        events.append(event)
        if event.type == "response.output_text.delta" and len(events) < 8:
            threading.Thread(
                target=client.responses.cancel, args=[event.item_id.split("_", 1)[1].rsplit("_", 1)[0]]
            ).start()
    last = events[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert time.monotonic() - began < 30
    kept = client.responses.retrieve(last.response.id)
    assert (kept.status, kept.output_text) == ("cancelled", last.response.output_text)
    assert client.responses.cancel(kept.id) == kept


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"background": True}, "background is not accepted"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"max_tool_calls": 1}, "max_tool_calls is not supported"),
        ({"truncation": "auto"}, "truncation is not accepted"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
        ({"reasoning": {"effort": 0}}, "reasoning.effort is 0"),
        ({"max_output_tokens": -1}, "max_output_tokens is not accepted"),
        ({"tools": [{**FLAT_TOOL, "defer_loading": True}]}, "tools.0.defer_loading is not supported"),
        ({"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "x", "zzz": 1}}, "tool_choice.zzz"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, field: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/responses", body={"model": MODEL, "input": "hi", **field}, cast_to=object)
    assert words in refusal.value.body["message"]


@pytest.mark.full
def test_a_response_belongs_to_the_key_that_asked_for_it() -> None:
    with serving("--api-key", "one", "--api-key", "two", api_key="one") as served:
        other = Served(**{**vars(served), "api_key": "two"})
        with openai_of(served) as first, openai_of(other) as second:
            kept = create(first, reasoning=NO_THINKING, max_output_tokens=1)
            assert first.responses.retrieve(kept.id).id == kept.id
            with pytest.raises(openai.NotFoundError):
                second.responses.retrieve(kept.id)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", '{"input": "hi", "metadata": {"a": "\\ud800"}, "max_output_tokens": 1}'),
        ("/responses", '{"input": [{"\\ud800": 1}]}'),
        ("/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/chat/completions", '{"messages": [{"role": "user", "\\ud800": 1}]}'),
        ("/chat/completions", '{"messages": [], "\\ud800": 1}'),
        ("/messages", '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'),
        ("/messages", '{"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}], "max_tokens": 1}'),
        ("/chat/completions", '{"messages": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
)
def test_half_characters_and_towers_of_brackets_are_refused(served: Served, path: str, body: str) -> None:
    headers = {**served.headers, "content-type": "application/json"}
    request = urllib.request.Request(f"{served.base_url}/v1{path}", body.encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as refusal, contextlib.closing(urllib.request.urlopen(request)):
        pass
    with refusal.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"]["message"]
