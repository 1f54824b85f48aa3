"""Messages through Anthropic's client and a real server."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.clients import MESSAGES_TOOL, MODEL, anthropic_of, user
from tests.server.serving import Served

NO_THINKING: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_of(served) as found:
        yield found


def create(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "messages": [user("import os")], "max_tokens": 6, **more})


def test_a_stream_adds_up_to_the_whole(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"thinking": NO_THINKING, "extra_body": {"temperature": 0}}
    one = create(client, **asked)
    with client.messages.stream(model=MODEL, messages=[user("import os")], max_tokens=6, **asked) as stream:
        kinds = [event.type for event in stream]
        other = stream.get_final_message()
    assert other.content[0].text == one.content[0].text
    assert other.stop_reason == one.stop_reason == "max_tokens"
    assert other.usage.output_tokens == one.usage.output_tokens == 6
    assert one.usage.input_tokens + one.usage.cache_read_input_tokens == 6
    assert other.usage.input_tokens + other.usage.cache_read_input_tokens == 6
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_thinking_is_a_block_with_a_signature_and_comes_back(client: anthropic.Anthropic) -> None:
    one = create(client, thinking={"type": "enabled", "budget_tokens": 1024})
    (block,) = one.content
    assert (block.type, bool(block.signature), bool(block.thinking)) == ("thinking", True, True)
    assert one.headrace["reasoning_effort"] == 75
    back = {"role": "assistant", "content": [block.model_dump(), {"type": "text", "text": "ok"}]}
    assert create(client, messages=[user("import os"), back, user("more")], max_tokens=1).content


def test_what_was_read_from_the_cache_is_no_input(client: anthropic.Anthropic) -> None:
    text = "wheel " * 300
    asked: dict[str, Any] = {"messages": [user(text)], "thinking": NO_THINKING, "max_tokens": 1}
    first, second = create(client, **asked).usage, create(client, **asked).usage
    assert first.input_tokens + first.cache_read_input_tokens == second.input_tokens + second.cache_read_input_tokens
    assert second.cache_read_input_tokens > 250
    assert second.input_tokens < 60


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"const": "水车<END>more"}}}
    asked: dict[str, Any] = {"thinking": NO_THINKING, "output_config": form, "max_tokens": 40}
    one = create(client, stop_sequences=["<END>"], **asked)
    assert (one.content[0].text, one.stop_reason, one.stop_sequence) == ('"水车', "stop_sequence", "<END>")
    assert json.loads(create(client, **asked).content[0].text) == "水车<END>more"


def test_an_answer_that_was_begun_goes_on(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"thinking": NO_THINKING, "max_tokens": 3}
    begun = create(client, messages=[user("code"), {"role": "assistant", "content": "import sys, o"}], **asked)
    assert begun.content[0].text
    assert not begun.content[0].text.startswith("import")


def test_tokens_are_counted_with_tools(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens
    few = count(model=MODEL, messages=[user("hi")], thinking=NO_THINKING).input_tokens
    many = count(model=MODEL, messages=[user("hi")], thinking=NO_THINKING, tools=[MESSAGES_TOOL]).input_tokens
    assert few == 5
    assert many > 300


THINKING_AND_FORCED = {"thinking": {"type": "enabled"}, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": []}, "mcp_servers is not supported"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "accepted are text, image"),
        (THINKING_AND_FORCED, "thinking does not go"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: anthropic.Anthropic, field: dict[str, Any], words: str
) -> None:
    body = {"model": MODEL, "messages": [user("hi")], "max_tokens": 2, **field}
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.post("/v1/messages", body=body, cast_to=object)
    assert refusal.value.body["error"]["type"] == "invalid_request_error"
    assert words in refusal.value.body["error"]["message"]
