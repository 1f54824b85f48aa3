"""Conversations that end early: the client leaves, or somebody ends them; and the helpers of official clients."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.server.clients import MODEL, OFF, anthropic_of, openai_of, user
from tests.server.inside import Inside
from tests.server.serving import Served

LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 4000}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_of(served) as found:
        yield found


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_of(served) as found:
        yield found


def test_work_ends_with_the_client(opened: Inside) -> None:
    with (
        openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=opened.base_url, api_key="none", max_retries=0) as claude,
    ):
        leave(opened, client, claude)
    opened.until_idle()
    assert opened.state.in_flight == 0
    assert opened.state.protocol.running == {}


def leave(opened: Inside, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    bias = {"1": -100}
    chat = client.chat.completions.create(messages=[user("hi")], stream=True, logit_bias=bias, **LONG)
    response = client.responses.create(model=MODEL, input="hi", stream=True, extra_body={"logit_bias": bias})
    message = claude.messages.create(messages=[user("hi")], stream=True, extra_body={"logit_bias": bias}, **LONG)
    for stream in (chat, response, message):
        for _ in range(6):
            next(iter(stream))
        assert opened.alive()
        stream.close()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_an_answer_that_somebody_ends_is_an_error_of_its_dialect(
    served: Served, client: openai.OpenAI, claude: anthropic.Anthropic, dialect: str
) -> None:
    def abort(response_id: str) -> None:
        url = f"{served.base_url}/abort_request"
        client.post(url, body={"request_id": response_id}, cast_to=object)

    if dialect == "chat":
        chat = client.chat.completions.create(messages=[user("hi")], stream=True, logit_bias={"1": -100}, **LONG)
        with contextlib.closing(chat), pytest.raises(openai.APIError, match="ended through /abort_request"):
            for place, chunk in enumerate(chat):
                if place == 0:
                    abort(chunk.id)
        return
    bias: dict[str, Any] = {"logit_bias": {"1": -100}}
    message = claude.messages.create(messages=[user("hi")], stream=True, extra_body=bias, **LONG)
    with contextlib.closing(message), pytest.raises(anthropic.APIStatusError, match="ended through /abort_request"):
        for event in message:
            if event.type == "message_start":
                abort(event.message.id)


class Reply(pydantic.BaseModel):
    ok: bool
    way: Literal["left", "right"]


def test_helpers_that_parse_get_what_they_asked_for(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "response_format": Reply, "reasoning_effort": OFF, "max_tokens": 60}
    found = client.chat.completions.parse(messages=[user("Which way?")], **asked)
    assert found.choices[0].message.parsed.way in ("left", "right")
    response = client.responses.parse(
        model=MODEL, input="Which way?", text_format=Reply, reasoning={"effort": "none"}, max_output_tokens=60
    )
    assert response.output_parsed.way in ("left", "right")
    asked = {"model": MODEL, "reasoning": {"effort": "none"}, "max_output_tokens": 60, "text_format": Reply}
    with client.responses.stream(input="Which way?", **asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed.way in ("left", "right")
    assert kinds[-1] == "response.completed"
