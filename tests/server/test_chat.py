"""Chat completions through OpenAI's client and a real server: whole and streamed, with everything a request may ask."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients import CHAT_TOOL, MODEL, OFF, WHEEL, check_wheel, openai_of, user
from tests.server.serving import Served

THINK_END = 8


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_of(served) as found:
        yield found


def whole(client: openai.OpenAI, text: str = "import os", **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=more.pop("messages", [user(text)]), **more)


def streamed(client: openai.OpenAI, **more: Any) -> dict[str, Any]:
    """Return what a stream adds up to."""
    found: dict[str, Any] = {"chunks": list(whole(client, stream=True, **more)), "texts": {}, "reasons": {}, "log": {}}
    for chunk in found["chunks"]:
        found["usage"] = chunk.usage
        for choice in chunk.choices:
            reasoning = getattr(choice.delta, "reasoning_content", None) or ""
            before = found["texts"].get(choice.index, ("", ""))
            found["texts"][choice.index] = (before[0] + reasoning, before[1] + (choice.delta.content or ""))
            if choice.logprobs is not None:
                found["log"].setdefault(choice.index, []).extend(choice.logprobs.content or ())
            if choice.finish_reason is not None:
                assert choice.index not in found["reasons"]
                found["reasons"][choice.index] = choice.finish_reason
    return found


@pytest.mark.parametrize(("effort", "sampling"), [("none", {"temperature": 0}), ("low", {"seed": 11})])
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, effort: Any, sampling: dict[str, Any]) -> None:
    asked = {"reasoning_effort": effort, "max_tokens": 6, "seed": 3, **sampling}
    one = whole(client, **asked)
    other = streamed(client, stream_options={"include_usage": True}, **asked)
    message = one.choices[0].message
    assert other["texts"] == {0: (getattr(message, "reasoning_content", None) or "", message.content or "")}
    assert other["reasons"] == {0: one.choices[0].finish_reason}
    assert other["usage"].completion_tokens == one.usage.completion_tokens
    assert other["usage"].prompt_tokens == one.usage.prompt_tokens
    assert one.usage.prompt_tokens_details.cached_tokens <= one.usage.prompt_tokens
    assert other["chunks"][-1].choices == []
    assert all(chunk.usage is None for chunk in other["chunks"][:-1])
    assert other["chunks"][0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in other["chunks"]} == {other["chunks"][0].id}
    assert (message.content == "") == (effort == "low")  # nano never ends its reasoning by itself


def test_usage_is_told_only_where_it_is_asked_for(client: openai.OpenAI) -> None:
    found = streamed(client, reasoning_effort=OFF, max_tokens=2)
    assert all(chunk.usage is None and chunk.choices for chunk in found["chunks"])


def test_what_was_used_is_told_and_a_told_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    one = whole(client, reasoning_effort=33, max_tokens=8)
    about = one.headrace
    assert (about["reasoning_effort"], about["thinking"], about["temperature"]) == (33, True, 1.0)
    again = whole(client, reasoning_effort=33, max_tokens=8, seed=about["seed"])
    assert again.choices[0].message.reasoning_content == one.choices[0].message.reasoning_content
    chunks = streamed(client, reasoning_effort="max", max_tokens=2)["chunks"]
    assert chunks[-1].headrace["reasoning_effort"] == 100


def test_several_answers_are_told_apart_and_the_first_is_that_of_one(client: openai.OpenAI) -> None:
    asked = {"reasoning_effort": OFF, "max_tokens": 4, "seed": 5, "temperature": 1.5}
    many = whole(client, n=3, **asked)
    texts = [choice.message.content for choice in many.choices]
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == whole(client, **asked).choices[0].message.content
    stream = streamed(client, n=3, **asked)
    assert [stream["texts"][index][1] for index in range(3)] == texts
    assert many.usage.completion_tokens == 12


def test_log_probs_cover_the_text(client: openai.OpenAI) -> None:
    asked = {"reasoning_effort": OFF, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    one = whole(client, **asked).choices[0]
    entries = one.logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == one.message.content
    assert all(
        len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries
    )
    assert streamed(client, **asked)["log"][0] == entries
    assert whole(client, reasoning_effort=OFF, max_tokens=2).choices[0].logprobs is None


def forced(pattern: str, **more: Any) -> dict[str, Any]:
    """Ask for a text that a pattern fixes, whatever the model would say."""
    return {"reasoning_effort": OFF, "max_tokens": 64, "response_format": {"type": "regex", "regex": pattern}, **more}


@pytest.mark.parametrize("text", ["hi 👩‍👧 水!", "a\u0301\u2028b"])
def test_characters_are_never_cut(client: openai.OpenAI, text: str) -> None:
    assert whole(client, **forced(text)).choices[0].message.content == text
    found = streamed(client, **forced(text))
    assert found["texts"][0][1] == text
    assert not any("\ufffd" in (choice.delta.content or "") for chunk in found["chunks"] for choice in chunk.choices)


@pytest.mark.parametrize(("before", "stops"), [("banana", "<END>"), ("水车", ["<EN<", "<END>"]), ("水<EN", "<END>")])
def test_a_stop_string_ends_right_after_any_text(client: openai.OpenAI, before: str, stops: Any) -> None:
    asked = forced(f"{before}<END>apple", stop=stops)
    one = whole(client, **asked)
    assert (one.choices[0].message.content, one.choices[0].finish_reason) == (before, "stop")
    assert one.headrace["stop"] == "<END>"
    found = streamed(client, **asked)
    assert (found["texts"][0][1], found["reasons"][0]) == (before, "stop")


def test_a_stop_string_ends_reasoning_too(client: openai.OpenAI) -> None:
    asked = {"reasoning_effort": "low", "max_tokens": 12, "seed": 2}
    reasoning = whole(client, **asked).choices[0].message.reasoning_content
    stop = reasoning[len(reasoning) // 2 :][:4]
    one = whole(client, stop=[stop], **asked).choices[0]
    assert one.message.reasoning_content == reasoning[: reasoning.index(stop)].lstrip("\n")
    assert (one.message.content, one.finish_reason) == ("", "stop")


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("effort", ["none", "high"])
def test_json_follows_its_schema_behind_the_reasoning(client: openai.OpenAI, effort: Any) -> None:
    more = {} if effort == "none" else {"logit_bias": {str(THINK_END): 100.0}}
    one = whole(client, reasoning_effort=effort, max_tokens=60, seed=1, response_format=JSON_FORMAT, **more).choices[0]
    found = json.loads(one.message.content)
    assert set(found) == {"ok", "n"}
    assert isinstance(found["ok"], bool)
    assert one.finish_reason == "stop"


def test_an_unfinished_reasoning_has_no_json_and_no_end(client: openai.OpenAI) -> None:
    one = whole(client, max_tokens=12, seed=1, response_format=JSON_FORMAT, logit_bias={"1": 100}).choices[0]
    assert (one.message.content, one.finish_reason) == ("", "length")


def test_any_object_will_do_where_that_is_asked_for(client: openai.OpenAI) -> None:
    asked = {"response_format": {"type": "json_object"}, "reasoning_effort": OFF, "max_tokens": 40, "seed": 4}
    one = whole(client, "Answer in json", logit_bias={str(n): 5.0 for n in (95, 97)}, **asked).choices[0]
    assert one.message.content.lstrip().startswith("{")


def test_an_answer_that_was_begun_goes_on(client: openai.OpenAI) -> None:
    begun = {"role": "assistant", "content": "import os\nimport s", "prefix": True}
    one = whole(client, messages=[user("code"), begun], reasoning_effort=OFF, max_tokens=4, temperature=0)
    assert one.choices[0].message.content
    assert not one.choices[0].message.content.startswith("import os")


def test_a_named_call_is_valid_and_streams(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "turn_wheel"}}
    asked = {"tools": [CHAT_TOOL], "tool_choice": choice, "max_tokens": 300, "seed": 6, "parallel_tool_calls": False}
    choices = [choice for chunk in whole(client, stream=True, **asked) for choice in chunk.choices]
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert choices[-1].finish_reason == "tool_calls"
    assert parts[0].function.name == "turn_wheel"
    assert {part.index for part in parts} == {0}
    assert len(parts) > 4
    check_wheel("".join(part.function.arguments for part in parts))


def test_no_call_where_none_is_wanted(client: openai.OpenAI) -> None:
    one = whole(client, tools=[CHAT_TOOL], tool_choice="none", reasoning_effort=OFF, max_tokens=4, temperature=0)
    assert one.choices[0].message.tool_calls is None
    assert one.usage.prompt_tokens < 20


def named(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": WHEEL["name"], **more}}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"functions": []}, "functions is not supported"),
        ({"model": "gpt-9"}, "model 'gpt-9' is not served here"),
        ({"reasoning_effort": 101}, "reasoning_effort is 101"),
        ({"store": True}, "store is not accepted"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_tokens and max_completion_tokens differ"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"tools": [CHAT_TOOL], "tool_choice": named(zzz=1)}, "tool_choice.function.zzz is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "zzz": 1}}}, "json_schema.zzz"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "data:", "zzz": 1}}])]}, "image_url.zzz"),
        ({"n": 129}, "n is 129"),
        ({"temperature": 3}, "temperature"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}, "name": "x"}}},
            "nope",
        ),
    ],
)
def test_refusals_say_what(client: openai.OpenAI, field: dict[str, Any], words: str) -> None:
    body = {"model": MODEL, "messages": [user("hi")], "max_tokens": 2, **field}
    with pytest.raises(openai.APIStatusError) as refusal:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refusal.value.status_code == (404 if "model" in field else 400)
    assert words in refusal.value.body["message"]


def test_a_model_without_eyes_refuses_images_and_addresses_are_not_fetched(client: openai.OpenAI) -> None:
    for url in ("data:image/png;base64,aGk=", "http://127.0.0.1:1/x.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.BadRequestError, match="this model takes no images"):
            whole(client, messages=[{"role": "user", "content": [part]}])


def test_harmless_fields_are_accepted(client: openai.OpenAI) -> None:
    asked = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    assert whole(client, reasoning_effort=OFF, max_tokens=1, extra_body=asked).choices


def test_an_x_ray_is_kept_under_the_answer_s_id(client: openai.OpenAI) -> None:
    one = whole(client, reasoning_effort=OFF, max_tokens=2, extra_body={"xray": True})
    found = client.get(f"/xray/{one.id}", cast_to=str)
    assert "event: end" in found
