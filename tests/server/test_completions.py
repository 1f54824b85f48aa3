"""`/v1/completions` and its neighbours through the official client, against the engine asked directly."""

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from headrace.engine.sampling.params import SamplingParams
from tests.server.inside import NAME, Inside

PROMPT = "def read_config(path):\n"


@pytest.fixture(scope="module")
def client(opened: Inside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key="none", max_retries=0) as found:
        yield found


def complete(client: openai.OpenAI, **body: Any) -> Any:
    extra = {name: body.pop(name) for name in list(body) if name in EXTENSIONS}
    return client.completions.create(**{"model": NAME, "prompt": PROMPT, **body}, extra_body=extra)


EXTENSIONS = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "structured_outputs", "mode",
    "priority", "cache_salt", "xray",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.8, "seed": 6, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"5": 2.0}},
        {"temperature": 0.0, "ignore_eos": True, "mode": "full"},
    ],
)
def test_an_answer_is_the_engines(client: openai.OpenAI, opened: Inside, asked: dict[str, Any]) -> None:
    params = {**asked, "logit_bias": {int(key): value for key, value in asked.get("logit_bias", {}).items()}}
    (expected,) = opened.llm.generate(PROMPT, SamplingParams(max_tokens=24, **params))
    answer = complete(client, max_tokens=24, **asked)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.choices[0].seed == (expected.seed if "seed" in asked else answer.choices[0].seed)
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.system_fingerprint == expected.numerics
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")


def test_the_default_temperature_samples(client: openai.OpenAI) -> None:
    texts = {complete(client, max_tokens=8, seed=seed).choices[0].text for seed in range(4)}
    assert len(texts) > 1
    assert complete(client, max_tokens=8, seed=1).choices[0].text in texts


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_stream_is_the_same_answer_in_parts(client: openai.OpenAI, logprobs: int | None) -> None:
    asked = {"max_tokens": 20, "seed": 3, "logprobs": logprobs, "n": 2, "stop": ["zzz"]}
    whole = complete(client, **asked)
    options = {"include_usage": True}
    chunks = list(complete(client, **asked, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if logprobs is None:
            assert choice.logprobs is None
            continue
        tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
        values = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
        tops = [top for part in parts if part.logprobs for top in part.logprobs.top_logprobs]
        offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
        assert (tokens, values) == (choice.logprobs.tokens, choice.logprobs.token_logprobs)
        assert (tops, offsets) == (choice.logprobs.top_logprobs, choice.logprobs.text_offset)


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(complete(client, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_many_prompts_have_their_choices_in_order(client: openai.OpenAI) -> None:
    prompts = ["import os", "class Reader:"]
    answer = complete(client, prompt=prompts, n=2, max_tokens=6, seed=9)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        alone = complete(client, prompt=prompt, n=2, max_tokens=6, seed=9)
        mine = answer.choices[2 * place : 2 * place + 2]
        assert [choice.text for choice in mine] == [choice.text for choice in alone.choices]
    assert answer.usage.completion_tokens == 24


def test_prompts_of_ids_and_of_text_are_the_same(client: openai.OpenAI, opened: Inside) -> None:
    ids = opened.llm.encode(PROMPT).tolist()
    forms = (PROMPT, ids, [PROMPT], [ids, ids])
    texts = [complete(client, prompt=prompt, max_tokens=8, temperature=0).choices for prompt in forms]
    assert len({choice.text for choices in texts for choice in choices}) == 1
    assert [len(choices) for choices in texts] == [1, 1, 1, 2]


def test_stops_end_the_text_and_are_reported(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=40, temperature=0).choices[0].text
    stop = whole[10:14]
    answer = complete(client, max_tokens=40, temperature=0, stop=[stop, "never"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


def test_structures_hold(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=40, structured_outputs={"regex": "(yes|no), [0-9]{3}"}).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text.split(", ")[0] in {"yes", "no"}
    one = complete(client, max_tokens=40, structured_outputs={"choice": ["red", "green"]}).choices[0]
    assert one.text in {"red", "green"}


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = list(range(700, 1100))
    first = complete(client, prompt=prompt, max_tokens=1, cache_salt="usage")
    second = complete(client, prompt=prompt, max_tokens=1, cache_salt="usage")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > 300
    assert second.choices[0].cache == {
        "cached_tokens": cached,
        "cached_tokens_by_tier": {"device": cached},
        "lineage": "exact",
        "reencoded_rows": 128,
        "replayed_rows": 128,
        "reason": None,
    }


# --------------------------------------------------------------------------------------------------- echo and log-probs


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    plain = complete(client, max_tokens=6, temperature=0).choices[0].text
    assert complete(client, max_tokens=6, temperature=0, echo=True).choices[0].text == PROMPT + plain
    streamed = complete(client, max_tokens=6, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT + plain


def test_echo_alone_scores_a_prompt(client: openai.OpenAI, opened: Inside) -> None:
    answer = complete(client, max_tokens=0, echo=True, logprobs=2)
    found = answer.choices[0].logprobs
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (expected,) = opened.llm.generate(PROMPT, params)
    assert answer.choices[0].text == "".join(found.tokens) == PROMPT
    assert found.token_logprobs == [entry.logprob for entry in expected.prompt_logprobs[1:]]
    assert [PROMPT[offset:].startswith(token) for offset, token in zip(found.text_offset, found.tokens, strict=True)]
    assert all(len(top) == 2 for top in found.top_logprobs)
    assert answer.usage.completion_tokens == 0


def test_echo_with_log_probabilities_joins_prompt_and_answer(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=4, temperature=0, echo=True, logprobs=0).choices[0]
    plain = complete(client, max_tokens=4, temperature=0, logprobs=0, mode="full").choices[0]
    assert answer.text == "".join(answer.logprobs.tokens) == PROMPT + plain.text
    assert answer.logprobs.token_logprobs[-4:] == plain.logprobs.token_logprobs
    assert answer.logprobs.text_offset[-4:] == [len(PROMPT) + offset for offset in plain.logprobs.text_offset]


def test_parts_of_a_character_are_spelled_as_bytes(client: openai.OpenAI) -> None:
    answer = complete(client, prompt="한글", max_tokens=0, echo=True, logprobs=0).choices[0]
    spelled = [token for token in answer.logprobs.tokens if token.startswith("bytes:")]
    assert spelled
    data = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token in spelled else token.encode()
        for token in answer.logprobs.tokens
    )
    assert data.decode() == "한글"


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "accepted is only n"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 5}, "n", "slots"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"max_tokens": 0}, "max_tokens", "0 with echo"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1.0}, "temperature", "-1"),
        ({"top_p": 0.0}, "top_p", "0"),
        ({"seed": -1}, "seed", "-1"),
        ({"prompt": []}, "prompt", "none of the forms"),
        ({"prompt": ""}, None, ""),
        ({"prompt": [1 << 40]}, "prompt", "not in the vocabulary"),
        ({"prompt": [5] * 20_000}, "prompt", "16384"),
        ({"stop": [""]}, "stop", "empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream", "only without stream"),
        ({"echo": True, "logprobs": 1, "mode": "replay"}, "mode", "full"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "("}}, "structured", "regex"),
        ({"xray": True, "n": 2}, "xray", "one answer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, asked: dict[str, Any], param: str | None, words: str
) -> None:
    if asked == {"prompt": ""}:  # the begin token alone
        assert complete(client, **asked, max_tokens=1).usage.prompt_tokens == 1
        return
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **asked)
    assert caught.value.body["param"] == param
    assert words in caught.value.body["message"]


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="gpt-oss")
    assert caught.value.code == "model_not_found"


def test_a_stream_that_is_refused_has_the_status_of_its_refusal(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, n=5, stream=True)


# ----------------------------------------------------------------------------------------------------------- neighbours


def test_models_lists_the_one_with_its_limits(client: openai.OpenAI, opened: Inside) -> None:
    (found,) = client.models.list().data
    assert (found.id, found.max_model_len) == (NAME, opened.llm.max_context)
    assert client.models.retrieve(NAME) == found
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokenize_and_detokenize_are_inverse(opened: Inside) -> None:
    text = "def f(x): return '한글 🙂'"
    found = httpx2.post(f"{opened.base_url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == opened.llm.encode(text).tolist()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    plain = httpx2.post(f"{opened.base_url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert plain["tokens"] == found["tokens"][1:]
    back = httpx2.post(f"{opened.base_url}/detokenize", json={"tokens": plain["tokens"]}).json()
    assert back == {"prompt": text}
    refused = httpx2.post(f"{opened.base_url}/detokenize", json={"tokens": [1 << 30]})
    assert refused.status_code == 400


def test_version_names_the_numerics(opened: Inside) -> None:
    found = httpx2.get(f"{opened.base_url}/version").json()
    assert (found["model"], found["numerics"]) == (NAME, opened.llm.numerics)
