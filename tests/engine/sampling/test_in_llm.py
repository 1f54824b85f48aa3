"""What a request asks of the sampler, through `LLM`, on a random model whose ids below 256 are bytes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams, Structured
from headrace.core.errors import UserError
from headrace.engine.result import Result
from tests.engine.results import told, working_steps
from tests.factories import tiny_checkpoint, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sampling"), tiny_config(vision=False))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1, chunk=16, is_audited=True) as one:
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
    assert [told(one) for one in together] == [told(llm.generate("the wheel", one)[0]) for one in params]


def test_bias_and_stop_ids_reach_the_sampler(llm: LLM) -> None:
    result = answer(llm, logit_bias={97: 100}, max_tokens=4)
    assert result.text == "aaaa"
    assert result.logprobs[0] < -0.1  # of the model itself, not of what the bias makes of it
    result = answer(llm, logit_bias={97: 100}, stop_token_ids=[97])
    assert (result.text, result.token_ids, result.finish_reason) == ("", [97], "stop")
    assert result.stop == 97


def test_stop_strings_and_the_least_number_of_tokens_reach_the_answer(llm: LLM) -> None:
    result = answer(llm, logit_bias={97: 100}, stop=["aaa", "b"], max_tokens=9)
    assert (result.text, result.stop, result.finish_reason) == ("", "aaa", "stop")
    result = answer(llm, logit_bias={97: 100}, stop=["aaa"], min_tokens=5, max_tokens=9)
    assert (result.text, len(result.token_ids)) == ("aaaa", 7)
    result = answer(llm, logit_bias={97: 100}, stop_token_ids=[97], min_tokens=3, max_tokens=9)
    assert result.stop == 97
    assert len(result.token_ids) == 4


def test_the_least_number_of_tokens_comes_before_the_end(llm: LLM) -> None:
    eos = llm.config.eos_token_id
    result = answer(llm, logit_bias={eos: 100}, min_tokens=5)
    assert (len(result.token_ids), result.token_ids[-1], result.finish_reason) == (6, eos, "stop")


def test_further_answers_are_alternatives_each_with_its_seed(llm: LLM) -> None:
    hot = {"temperature": 1.0, "max_tokens": 7, "ignore_eos": True}
    result = answer(llm, n=3, **hot)
    assert told(result) == told(result.__class__(**{**vars(answer(llm, **hot)), "alternatives": result.alternatives}))
    assert len(result.alternatives) == 2
    for other in result.alternatives:
        assert other.alternatives == ()
        assert told(other) == told(answer(llm, **hot | {"seed": other.seed}))
    assert len({tuple(one.token_ids) for one in (result, *result.alternatives)}) == 3


def test_pieces_of_further_answers_say_which_answer_they_are_of(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=5, seed=4, ignore_eos=True)
    texts: dict[tuple[int, int], str] = {}
    results: dict[tuple[int, int], Result] = {}
    for piece in llm.stream(["the wheel", "a dam"], params):
        place = (piece.index, piece.choice)
        texts[place] = texts.get(place, "") + piece.text
        if piece.result is not None:
            results[place] = piece.result
    assert sorted(results) == [(prompt, choice) for prompt in range(2) for choice in range(3)]
    assert texts == {place: result.text for place, result in results.items()}


def test_alternatives_and_prompt_log_probabilities_are_reported(llm: LLM) -> None:
    result = answer(llm, top_logprobs=3, prompt_logprobs=2, max_tokens=4)
    assert result.token_logprobs is not None
    assert [one.token_id for one in result.token_logprobs] == result.token_ids
    assert [one.logprob for one in result.token_logprobs] == result.logprobs
    assert all(one.rank == 1 and len(one.top) == 3 for one in result.token_logprobs)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    ids = llm.encode("the wheel").tolist()
    assert [one.token_id for one in result.prompt_logprobs[1:] if one is not None] == ids[1:]
    assert result.token_ids == answer(llm, mode="full", max_tokens=4).token_ids
    plain = answer(llm, max_tokens=4)
    assert (plain.token_logprobs, plain.prompt_logprobs) == (None, None)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {320: 1}}, "token id 320 at index 0 is not in the vocabulary; accepted are 0 to 319"),
        ({"stop_token_ids": [5, 400]}, "token id 400 at index 1 is not in the vocabulary"),
    ],
)
def test_what_no_model_can_do_is_refused_before_anything_runs(llm: LLM, params: dict[str, object], words: str) -> None:
    before = working_steps(llm)
    with pytest.raises(UserError, match=re.escape(words)):
        llm.stream(["a", "b"], [SamplingParams(), SamplingParams(**params)])
    assert working_steps(llm) == before


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"structured": Structured.regex("(")}, "unclosed group"),
        ({"n": 17}, "17 answers at once need as many slots; there are 16"),
    ],
)
def test_what_the_engine_refuses_ends_the_call_and_nothing_else(
    llm: LLM, params: dict[str, object], words: str
) -> None:
    expected = told(answer(llm))
    with pytest.raises(UserError, match=re.escape(words)):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**params)])
    assert told(answer(llm)) == expected
    llm.audit()
