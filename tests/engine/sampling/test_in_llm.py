"""What a request asks of the sampler, through `LLM`, on a random model whose ids below 256 are bytes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams, Structured
from headrace.core.errors import UserError
from headrace.engine.request import Result
from tests.factories import tiny_checkpoint, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sampling"), tiny_config(vision=False))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1, chunk=16) as one:
        yield one


def answer(llm: LLM, **params: object) -> Result:
    (result,) = llm.generate("the wheel", SamplingParams(**{"max_tokens": 60, "seed": 1, **params}))
    return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_structure(llm: LLM, temperature: float) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    compact = {"x-guidance": {"whitespace_flexible": False}}  # a model that knows nothing may write spaces for ever
    result = answer(llm, structured=Structured.json_schema(schema | compact), temperature=temperature)
    assert result.finish_reason == "stop"
    assert [type(item) for item in json.loads(result.text)] == [bool, bool]
    result = answer(llm, structured=Structured.regex("[0-9]{3}-[0-9]{2}"), temperature=temperature)
    assert re.fullmatch(r"\d{3}-\d{2}", result.text)


def test_a_structure_cut_by_the_number_of_tokens_is_of_full_length(llm: LLM) -> None:
    result = answer(llm, structured=Structured.regex("[0-9]{50}"), max_tokens=5)
    assert result.finish_reason == "length"
    assert re.fullmatch(r"\d{5,}", result.text)


def test_answers_with_and_without_structure_run_beside_each_other(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=8, seed=1),
        SamplingParams(max_tokens=30, seed=2, temperature=1.0, structured=Structured.regex("[a-f]{4}|[0-9]{9}")),
        SamplingParams(max_tokens=9, seed=3, temperature=1.0, frequency_penalty=1.0, top_k=9),
    ]
    together = llm.generate(["the wheel"] * 3, params)
    assert together == [llm.generate("the wheel", one)[0] for one in params]


def test_bias_and_stop_ids_reach_the_sampler(llm: LLM) -> None:
    result = answer(llm, logit_bias={97: 100}, max_tokens=4)
    assert result.text == "aaaa"
    assert result.logprobs[0] < -0.1  # of the model itself, not of what the bias makes of it
    result = answer(llm, logit_bias={97: 100}, stop_token_ids=[97])
    assert (result.text, result.token_ids, result.finish_reason) == ("", [97], "stop")


def test_the_least_number_of_tokens_comes_before_the_end(llm: LLM) -> None:
    eos = llm.model.config.eos_token_id
    result = answer(llm, logit_bias={eos: 100}, min_tokens=5)
    assert (len(result.token_ids), result.token_ids[-1], result.finish_reason) == (6, eos, "stop")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 2}, "n is 2; this engine does not serve it yet"),
        ({"prompt_logprobs": True}, "prompt_logprobs is 0"),
        ({"top_logprobs": 3}, "top_logprobs is 3"),
        ({"mode": "full"}, "mode is 'full'"),
        ({"cache_salt": "a"}, "cache_salt is 'a'"),
        ({"logit_bias": {320: 1}}, "logit_bias names token 320; accepted are ids 0 to 319"),
        ({"structured": Structured.regex("(")}, "unclosed group"),
    ],
)
def test_what_is_not_served_is_refused_before_anything_runs(llm: LLM, params: dict[str, object], words: str) -> None:
    before = llm.work.layer_rows
    with pytest.raises(UserError, match=re.escape(words)):
        llm.stream(["a", "b"], [SamplingParams(), SamplingParams(**params)])
    assert llm.work.layer_rows == before


def test_a_structure_needs_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "bare", tiny_config(engram=False, vision=False, draft=False))
    (folder / "tokenizer.json").unlink()
    with LLM(folder, threads=1) as llm, pytest.raises(UserError, match=r"no tokenizer\.json, so no structure"):
        llm.generate([1, 2], SamplingParams(structured=Structured.regex("a")))
