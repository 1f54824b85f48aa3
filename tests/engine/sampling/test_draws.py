import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.sampling.noise import exponential_noise
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import sample
from headrace.engine.sampling.ranking import keep_top_p
from headrace.engine.sampling.seed import draw_seed, fork_seed
from tests.engine.sampling.states import chi_square, state_of

LOGITS = torch.tensor([0.3, -1.2, 1.1, 0.0, 2.0, -3.0, 0.9, 1.1])
SAMPLES = 4000
FROZEN = [2.5334315, 2.2768512, 0.9916859]  # noise of seed 5 at position 9; other numbers would change old answers
FROZEN_FORKS = [5, 8993857901468905243, 466571101246136885]


def sample_token(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    return sample(logits, state_of(params, seed=seed, position=position))


def draws(params: SamplingParams, logits: Tensor = LOGITS, *, seed: int = 7) -> list[int]:
    state, found = state_of(params, seed=seed), []
    for state.position in range(SAMPLES):
        found.append(sample(logits, state))
    return found


# --------------------------------------------------------------------------------------------------------- greedy


def test_temperature_zero_takes_the_largest_logit_and_of_equals_the_lower_id() -> None:
    params = SamplingParams()
    assert sample_token(LOGITS, params, 0, 0) == 4
    assert sample_token(torch.tensor([1.0, 3.0, 3.0, 2.0]), params, 5, 9) == 1
    assert sample_token(torch.tensor([-math.inf, -2.0]), params, 5, 9) == 1


def test_temperature_zero_ignores_seed_and_position() -> None:
    assert {sample_token(LOGITS, SamplingParams(), seed, seed * 3) for seed in range(50)} == {4}


# -------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_positions_of_one_request_follow_the_softmax(temperature: float) -> None:
    chi_square(draws(SamplingParams(temperature=temperature)), torch.softmax(LOGITS / temperature, 0))


def test_requests_of_consecutive_seeds_follow_the_softmax() -> None:
    params = SamplingParams(temperature=1.0)
    chi_square((sample_token(LOGITS, params, seed, 11) for seed in range(SAMPLES)), torch.softmax(LOGITS, 0))


def test_neighbouring_positions_are_independent() -> None:
    logits = torch.tensor([0.0, 0.5, 1.0])
    found = draws(SamplingParams(temperature=1.0), logits)
    p = torch.softmax(logits, 0)
    joint = (p.unsqueeze(1) * p).flatten()
    chi_square((3 * left + right for left, right in zip(found[::2], found[1::2], strict=True)), joint)


def test_the_same_position_of_neighbouring_seeds_is_independent() -> None:
    logits, params = torch.tensor([0.0, 0.5, 1.0]), SamplingParams(temperature=1.0)
    p = torch.softmax(logits, 0)
    pairs = (
        (sample_token(logits, params, 2 * s, 5), sample_token(logits, params, 2 * s + 1, 5)) for s in range(SAMPLES)
    )
    chi_square((3 * left + right for left, right in pairs), (p.unsqueeze(1) * p).flatten())


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [4, 2]), (0.7, [4, 2, 7]), (0.9, [4, 2, 7, 6, 0])])
def test_top_p_draws_from_the_smallest_most_probable_set(top_p: float, kept: list[int]) -> None:
    p = torch.softmax(LOGITS, 0)
    assert float(p[kept].sum()) >= top_p > float(p[kept[:-1]].sum())
    inside = torch.zeros(8)
    inside[kept] = p[kept]
    expected = inside / inside.sum()
    chi_square(draws(SamplingParams(temperature=1.0, top_p=top_p)), expected)


def test_top_p_is_applied_after_the_temperature() -> None:
    # at temperature 3 the two most probable tokens no longer reach a half
    assert len(set(draws(SamplingParams(temperature=3.0, top_p=0.5)))) == 3


def test_a_tiny_top_p_or_temperature_leaves_the_most_probable_token() -> None:
    for params in (
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-320),
    ):
        assert {sample_token(LOGITS, params, 3, position) for position in range(50)} == {4}


def test_of_equal_probabilities_top_p_keeps_the_lower_ids() -> None:
    assert keep_top_p(torch.full((4,), 0.25), 0.5).tolist() == [0.25, 0.25, 0.0, 0.0]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_top_p_keeps_enough_and_no_more(values: list[float], top_p: float) -> None:
    p = torch.softmax(torch.tensor(values), 0)
    kept = keep_top_p(p, top_p)
    inside = kept > 0
    assert kept[inside].equal(p[inside])
    rounding = 1e-5
    assert float(kept.sum()) >= min(top_p, float(p.sum())) - rounding
    if inside.sum() > 1:
        assert float(kept.sum() - kept[inside].min()) < top_p + rounding
    if not inside.all():
        assert float(kept[inside].min()) >= float(p[~inside].max())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[[1, 4]] = -math.inf
    assert set(draws(SamplingParams(temperature=1.0), logits)) <= {0, 2, 3, 5, 6, 7}


# ---------------------------------------------------------------------------------------------------------- seeds


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert exponential_noise(100, 5, 9).equal(exponential_noise(100, 5, 9))
    assert exponential_noise(50, 5, 9).equal(exponential_noise(100, 5, 9)[:50])


def test_no_two_seeds_or_positions_share_noise() -> None:
    """Seeds that differ in high bits only, and pairs whose sums or products agree, are different too."""
    pairs = [(0, 0), (1, 0), (0, 1), (2**32, 0), (2**32 + 1, 0), (2**62, 0), (1, 2**32), (2**63 - 1, 0), (3, 4), (4, 3)]
    first = {float(exponential_noise(1, seed, position)[0]) for seed, position in pairs}
    assert len(first) == len(pairs)


def test_answers_of_seeds_that_differ_in_high_bits_differ() -> None:
    params = SamplingParams(temperature=1.0)
    left, right = (draws(params, torch.zeros(1000), seed=seed)[:20] for seed in (5, 5 + 2**32))
    assert left != right


def test_noise_is_exponential_and_never_zero() -> None:
    noise = exponential_noise(100_000, 1, 2)
    assert float(noise.min()) > 0
    assert float(noise.mean()) == pytest.approx(1.0, abs=0.02)
    assert float((noise > 1).float().mean()) == pytest.approx(math.exp(-1), abs=0.01)


def test_noise_does_not_change_with_versions() -> None:
    assert exponential_noise(3, 5, 9).tolist() == pytest.approx(FROZEN, rel=1e-6)


def test_drawn_seeds_are_accepted_and_different() -> None:
    seeds = {draw_seed() for _ in range(20)}
    assert len(seeds) == 20
    for seed in seeds:
        SamplingParams(seed=seed)


def test_the_first_answer_of_several_keeps_the_seed_and_the_others_have_their_own() -> None:
    seeds = [fork_seed(seed, index) for seed in (5, 6, 2**63 - 1) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert fork_seed(5, 0) == 5
    for seed in seeds:
        SamplingParams(seed=seed)


def test_seeds_of_several_answers_do_not_change_with_versions() -> None:
    assert [fork_seed(5, index) for index in range(3)] == FROZEN_FORKS


def test_answers_of_one_prompt_are_independent() -> None:
    logits, params = torch.tensor([0.0, 0.5, 1.0]), SamplingParams(temperature=1.0)
    p = torch.softmax(logits, 0)
    pairs = []
    for seed in range(SAMPLES):
        first = state_of(params, seed=seed, position=5)
        pairs.append((sample(logits, first.fork(1)), sample(logits, first.fork(2))))
    chi_square((3 * left + right for left, right in pairs), (p.unsqueeze(1) * p).flatten())
