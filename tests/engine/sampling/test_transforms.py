"""Every step of the pipeline against its formula in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import adjust, sample, weights
from headrace.engine.sampling.ranking import keep_top_k, keep_top_p, largest_ids
from tests.engine.sampling.states import EOS, VOCAB, state_of

ROUNDING = 1e-5  # float32 against float64, of values up to about ten
PROMPT, ANSWER = (5, 5, 9, 17), (9, 3, 3, 3, 200)


def logits_of(seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def exact(logits: Tensor) -> np.ndarray:
    return logits.numpy().astype(np.float64)


def close(found: Tensor, wanted: np.ndarray) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted, rtol=ROUNDING, atol=ROUNDING)


# ------------------------------------------------------------------------------------------ before the temperature


def test_bias_is_added() -> None:
    wanted = exact(logits_of())
    wanted[3] += 2.5
    wanted[11] -= 100
    close(adjust(logits_of(), state_of(SamplingParams(logit_bias={3: 2.5, 11: -100}))), wanted)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer(penalty: float) -> None:
    wanted = exact(logits_of())
    for token_id in {*PROMPT, *ANSWER}:
        wanted[token_id] *= 1 / penalty if wanted[token_id] > 0 else penalty
    state = state_of(SamplingParams(repetition_penalty=penalty), prompt=PROMPT, answer=ANSWER)
    close(adjust(logits_of(), state), wanted)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.25), (-1.0, 1.5)])
def test_presence_and_frequency_count_the_answer_alone(presence: float, frequency: float) -> None:
    wanted = exact(logits_of())
    for token_id in set(ANSWER):
        wanted[token_id] -= presence + frequency * ANSWER.count(token_id)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    close(adjust(logits_of(), state_of(params, prompt=PROMPT, answer=ANSWER)), wanted)


def test_bias_comes_before_repetition_and_repetition_before_frequency() -> None:
    logits = torch.zeros(VOCAB)
    logits[3] = -1.0
    params = SamplingParams(logit_bias={3: 4.0}, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25)
    assert float(adjust(logits, state_of(params, answer=(3, 3)))[3]) == (-1 + 4) / 2 - 2 * 1 - 0.25


def test_counts_hold_more_tokens_than_there_was_room_for() -> None:
    answer = [token_id % 300 for token_id in range(900)]
    wanted = exact(logits_of())
    wanted[:300] -= 3 * 0.5
    close(adjust(logits_of(), state_of(SamplingParams(frequency_penalty=0.5), answer=answer)), wanted)


def test_the_end_is_impossible_until_the_answer_is_long_enough() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[8, 9])
    logits = logits_of()
    for answer in ((), (1,)):
        impossible = adjust(logits, state_of(params, answer=answer)).isinf()
        assert impossible.nonzero().squeeze(1).tolist() == [8, 9, EOS]
    assert adjust(logits, state_of(params, answer=(1, 2))) is logits


def test_an_ignored_end_token_stays_possible() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[8], ignore_eos=True)
    assert adjust(logits_of(), state_of(params)).isinf().nonzero().squeeze(1).tolist() == [8]


def test_logits_are_not_written_to() -> None:
    logits = logits_of()
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.5, min_p=0.1, logit_bias={1: 3}, repetition_penalty=2.0, min_tokens=9
    )
    sample(logits, state_of(params, prompt=PROMPT, answer=ANSWER))
    assert logits.equal(logits_of())


# ----------------------------------------------------------------------------------------------- from temperature on


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_logits(temperature: float) -> None:
    wanted = softmax(exact(logits_of()) / temperature)
    close(weights(logits_of(), SamplingParams(temperature=temperature)), wanted)


@pytest.mark.parametrize("top_k", [1, 7, VOCAB, VOCAB + 5])
def test_top_k_keeps_the_most_probable(top_k: int) -> None:
    logits = exact(logits_of())
    logits[np.argsort(-logits)[top_k:]] = -np.inf
    close(weights(logits_of(), SamplingParams(temperature=1.0, top_k=top_k)), softmax(logits))


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_keeps_what_is_near_the_most_probable_after_temperature(min_p: float) -> None:
    probabilities = softmax(exact(logits_of()) / 2)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    close(weights(logits_of(), SamplingParams(temperature=2.0, min_p=min_p)), probabilities / probabilities.sum())


def test_top_p_is_of_the_probabilities_that_the_other_cuts_left() -> None:
    """The first of four is 0.4 of all and 0.57 of the best two, so a half is one token after top-k, and two without."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    cut = weights(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    assert (cut > 0).tolist() == [True, False, False, False]
    cut = weights(logits, SamplingParams(temperature=1.0, min_p=0.7, top_p=0.5))
    assert (cut > 0).tolist() == [True, False, False, False]
    cut = weights(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert (cut > 0).tolist() == [True, True, False, False]


def test_top_k_comes_before_min_p() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    cut = weights(logits, SamplingParams(temperature=1.0, top_k=3, min_p=0.3))
    close(cut, np.array([4 / 9, 3 / 9, 2 / 9, 0]))


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.sampled_from([0.05, 1.0, 12.0]))
def test_the_head_of_top_p_is_what_a_whole_sort_gives(seed: int, top_p: float, scale: float) -> None:
    """Bitwise, on flat and peaked distributions, where one, some and all guesses of the size are needed."""
    p = torch.softmax(torch.randn(1500, generator=torch.Generator().manual_seed(seed)) * scale, -1)
    order = torch.sort(p, descending=True, stable=True)
    kept = order.indices[order.values.cumsum(-1) - order.values < top_p]
    wanted = torch.zeros_like(p)
    wanted[kept] = p[kept]
    assert keep_top_p(p, top_p).equal(wanted)


# --------------------------------------------------------------------------------------------------------------- ties


@given(st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0]), min_size=1, max_size=30), st.integers(1, 35))
def test_the_largest_come_first_and_of_equals_the_lower_id(values: list[float], count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest_ids(torch.tensor(values), count).tolist() == wanted


def test_of_equal_logits_top_k_keeps_the_lower_ids() -> None:
    cut = keep_top_k(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), 3)
    assert cut.tolist() == [1.0, 2.0, 1.0, -math.inf, -math.inf]


def test_greedy_takes_the_lower_of_equals_also_after_adjustment() -> None:
    logits = torch.zeros(VOCAB)
    assert sample(logits, state_of()) == 0
    assert sample(logits, state_of(SamplingParams(logit_bias=dict.fromkeys(range(2, 90), 1)))) == 2


@pytest.mark.parametrize("values", [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.9}, {"seed": 4}])
def test_greedy_is_not_affected_by_what_comes_after_it(values: dict[str, float]) -> None:
    for seed in range(20):
        logits = logits_of(seed)
        assert sample(logits, state_of(SamplingParams(**values))) == int(logits.argmax())


def test_greedy_is_affected_by_what_comes_before_it() -> None:
    logits = logits_of()
    best, second = largest_ids(logits, 2).tolist()
    assert sample(logits, state_of(SamplingParams(logit_bias={best: -100}))) == second
    assert sample(logits, state_of(SamplingParams(min_tokens=1, stop_token_ids=[best]))) == second
    assert sample(logits, state_of(SamplingParams(frequency_penalty=2.0), answer=[best] * 30)) == second


def test_a_top_p_below_every_float_keeps_the_most_probable_token() -> None:
    probabilities = torch.tensor([0.1, 0.7, 0.2])
    assert keep_top_p(probabilities, 1e-320).tolist() == pytest.approx([0.0, 0.7, 0.0])
