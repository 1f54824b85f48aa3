import math
import pickle

import pytest

from headrace.core.errors import UserError
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.spec import Structured
from tests.engine.sampling.states import state_of

JSON = Structured.json_object()


def test_the_defaults_are_greedy_and_change_no_logit() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (256, 0.0, 1, True)
    assert state_of(params).is_plain
    assert not state_of(params).is_adjusted


def test_lists_are_kept_as_tuples_so_that_equal_requests_are_equal() -> None:
    left = SamplingParams(stop=["a"], stop_token_ids=[3, 1, 3], logit_bias={7: 1, 2: -3.5})
    right = SamplingParams(stop=("a",), stop_token_ids=(3, 1), logit_bias=[(2, -3.5), (7, 1.0)])
    assert left == right
    assert hash(left) == hash(right)
    assert left.logit_bias == left.bias_pairs == ((2, -3.5), (7, 1.0))
    assert left.stop_token_ids == (3, 1)


def test_parameters_cross_processes() -> None:
    params = SamplingParams(
        seed=3, stop=["x"], logit_bias={4: 2.0}, structured=Structured.choice(["a", "b"]), deadline_s=1.5
    )
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(("value", "alternatives"), [(None, None), (False, None), (True, 0), (0, 0), (1, 1), (20, 20)])
def test_prompt_logprobs_are_a_flag_or_a_number_of_alternatives(
    value: bool | int | None, alternatives: int | None
) -> None:
    params = SamplingParams(prompt_logprobs=value)
    assert params.num_prompt_alternatives == alternatives
    assert params == SamplingParams(prompt_logprobs=alternatives)
    assert (params == SamplingParams()) == (alternatives is None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; accepted is a whole number from 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": -1}, "min_tokens is -1; accepted is a whole number from 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens is 6; accepted is at most max_tokens, here 5"),
        ({"temperature": -0.1}, "temperature is -0.1; accepted is 0 or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 0}, "top_k is 0; accepted is a whole number from 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; accepted is above 0 up to 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.01}, "min_p is -0.01; accepted is 0 up to 1"),
        ({"min_p": 1.01}, "min_p is 1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; accepted is above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; accepted is -2 up to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101; accepted is -100 up to 100"),
        ({"logit_bias": {3: math.nan}}, "logit_bias of token 3 is nan"),
        ({"logit_bias": {3: "1"}}, "logit_bias of token 3 is '1'"),
        ({"logit_bias": {-3: 1}}, "logit_bias names token -3"),
        ({"logit_bias": {"3": 1}}, "logit_bias names token '3'"),
        ({"logit_bias": [(3, 1), (3, 2)]}, "logit_bias names a token more than once"),
        ({"logit_bias": 5}, "logit_bias is not understood"),
        ({"logit_bias": [3, 4]}, "logit_bias is not understood"),
        ({"logit_bias": dict.fromkeys(range(4097), 1)}, "logit_bias has 4097 entries; accepted are 4096 at most"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"stop": "end"}, "stop is the single string 'end'"),
        ({"stop": [3]}, "a stop string is 3"),
        ({"stop": 3}, "stop is 3; accepted is a list of strings"),
        ({"stop_token_ids": [-2]}, "stop_token_ids names token -2"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"stop_token_ids": 12}, "stop_token_ids is 12"),
        ({"n": 0}, "n is 0; accepted is a whole number from 1 to 128"),
        ({"n": 129}, "n is 129"),
        ({"logprobs": 1}, "logprobs is 1; accepted are True and False"),
        ({"top_logprobs": 21}, "top_logprobs is 21; accepted is a whole number from 0 to 20"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs is 2 and logprobs is False"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0"),
        ({"prompt_logprobs": True, "mode": "replay"}, "prompt_logprobs needs the decoder on the whole prompt"),
        ({"ignore_eos": None}, "ignore_eos is None"),
        ({"structured": "a*"}, "structured is a str; accepted is a Structured or None"),
        ({"structured": JSON, "min_tokens": 2}, "min_tokens cannot be given together with structured"),
        ({"structured": JSON, "ignore_eos": True}, "ignore_eos cannot be given together with structured"),
        ({"priority": 1.5}, "priority is 1.5; accepted is a whole number"),
        ({"deadline_s": 0.0}, "deadline_s is 0.0; accepted is a number of seconds above 0"),
        ({"resume": "fast"}, "resume is 'fast'; accepted are 'exact', 'replay' and None"),
        ({"mode": ""}, "mode is ''; accepted are 'full', 'replay' and None"),
        ({"cache_salt": ""}, "cache_salt is ''"),
        ({"cache_salt": "a\ud800"}, "half a character"),
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        SamplingParams(**values)
    assert words in refusal.value.message
    assert refusal.value.param in values


@pytest.mark.parametrize("values", [{"logit_bias": {400: 1}}, {"stop_token_ids": [400]}])
def test_tokens_outside_the_vocabulary_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="names token 400; accepted are ids 0 to 399") as refusal:
        state_of(SamplingParams(**values))
    assert refusal.value.param in values
