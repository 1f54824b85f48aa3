"""Block verification and rejection leave the answers' distribution as it is: 200,000 texts of three tokens each."""

import numpy as np
import pytest
import torch

from headrace.engine.drafting.block_verification import Kept, keep_block
from headrace.engine.drafting.rejection import keep_tokens
from headrace.engine.drafting.verify_length import StaleCapacity, best_capacity, synchronous_lengths
from tests.engine.drafting.three_tokens import (
    SAMPLES,
    Chain,
    Keep,
    Numbers,
    chi_square,
    code,
    complete,
    follows,
    guess,
    judge,
)

RULES = [keep_block, keep_tokens]
TARGET, DRAFT = Chain(1, 4), Chain(2, 4)


@pytest.mark.parametrize("keep", RULES)
@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("has_bonus", [True, False])
def test_texts_are_distributed_as_without_drafting(keep: Keep, is_drawn: bool, has_bonus: bool) -> None:
    numbers = Numbers(5)
    ids = guess(DRAFT, numbers, SAMPLES, 2, is_drawn=is_drawn)
    texts, valid = judge(keep, TARGET, DRAFT if is_drawn else None, ids, numbers, has_bonus=has_bonus)
    assert follows(code(complete(TARGET, texts, valid, numbers)), TARGET.joint(3))


@pytest.mark.parametrize("keep", RULES)
def test_the_check_sees_a_distribution_that_is_not_the_drafters(keep: Keep) -> None:
    numbers, other = Numbers(5), Chain(9, 4)
    ids = guess(DRAFT, numbers, SAMPLES, 2, is_drawn=True)
    texts, valid = judge(keep, TARGET, other, ids, numbers)
    assert not follows(code(complete(TARGET, texts, valid, numbers)), TARGET.joint(3))


@pytest.mark.parametrize("keep", RULES)
def test_a_length_that_depends_on_the_guesses_before_changes_nothing(keep: Keep) -> None:
    numbers = Numbers(6)
    ids = guess(DRAFT, numbers, SAMPLES, 2, is_drawn=True)
    is_short = ids[:, 0] == 1  # whether guess 2 is judged depends on guess 1
    parts = [
        judge(keep, TARGET, DRAFT, ids[is_short, :1], numbers),
        judge(keep, TARGET, DRAFT, ids[~is_short], numbers),
    ]
    short, long = parts
    padded = torch.cat([short[0], torch.zeros((len(short[0]), 1), dtype=torch.int64)], 1)
    texts = torch.cat([complete(TARGET, padded, short[1], numbers), complete(TARGET, long[0], long[1], numbers)])
    assert follows(code(texts), TARGET.joint(3))


def test_block_verification_keeps_more_than_rejection() -> None:
    numbers = Numbers(7)
    ids = guess(DRAFT, numbers, SAMPLES, 3, is_drawn=True)
    means = []
    for keep in RULES:
        _, valid = judge(keep, TARGET, DRAFT, ids, numbers)
        means.append(float(valid.double().mean()) - 1)
    assert means[0] > means[1] + 0.02  # the standard error of either is about 0.002


@pytest.mark.parametrize("keep", RULES)
def test_a_perfect_drafter_is_always_kept(keep: Keep) -> None:
    """Where both distributions are the same, the chance to stop in the middle is 0 / 0."""
    numbers = Numbers(8)
    ids = guess(TARGET, numbers, 5000, 3, is_drawn=True)
    _, valid = judge(keep, TARGET, TARGET, ids, numbers)
    assert valid.tolist() == [4] * 5000


@pytest.mark.parametrize("keep", RULES)
def test_a_guess_that_the_model_rules_out_is_never_kept(keep: Keep) -> None:
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]]).expand(2000, 2, 3)
    draft = torch.tensor([[[0.1, 0.1, 0.8]]]).expand(2000, 1, 3)
    ids = torch.full((2000, 1), 2)
    kept: Kept = keep(target, draft, ids, Numbers(1).uniform(2000, 1))
    assert kept.num_kept.max() == 0
    assert torch.allclose(kept.weights[0], torch.tensor([0.4, 0.4, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("keep", RULES)
def test_the_distribution_stays_where_tokens_are_cut_and_the_forbidden_guess_has_no_row(keep: Keep) -> None:
    """Masks may rule out what the drafter drew; that it was drawn and refused must count."""
    target, draft, numbers = Chain(3, 3), Chain(4, 3), Numbers(9)
    for rows in target.rows:
        rows[:, 2] = 0
        rows.div_(rows.sum(-1, keepdim=True))
    ids = guess(draft, numbers, SAMPLES, 1, is_drawn=True)
    is_forbidden = ids[:, 0] == 2
    refused = judge(keep, target, draft, ids[is_forbidden], numbers, has_bonus=False)
    others = judge(keep, target, draft, ids[~is_forbidden], numbers)
    texts = torch.cat([complete(target, one, valid, numbers) for one, valid in (refused, others)])
    assert follows(code(texts), target.joint(2))
    # swept away before it was judged, the guess would make the others too frequent
    swept = complete(target, refused[0], torch.zeros_like(refused[1]), numbers)
    assert not follows(code(torch.cat([swept, complete(target, *others, numbers)])), target.joint(2))


# ------------------------------------------------------------------------------------ how many guesses are judged

# Guess 1 is token 0 or 1, equally likely; the model wants 0.7 and 0.3. Behind token 0 the drafter is sure of its second
# guess, behind token 1 it is not. A step costs the same for two guesses as for one.
COIN = torch.tensor([[0.7, 0.3, 0.0]], dtype=torch.float64)
GUESSED = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
SURVIVAL = {0: (0.8, 0.8), 1: (0.8, 0.0)}
SECONDS = {1: 1.0, 2: 2.0, 3: 2.0}


def first_tokens(keep: Keep, lengths: dict[int, int]) -> np.ndarray:
    """Return how often each first token came, [3], where guess 1 alone says how many guesses are judged."""
    numbers = Numbers(11)
    guesses = numbers.drawn(GUESSED.expand(SAMPLES, 3))
    is_judged = torch.tensor([lengths[int(token)] > 0 for token in (0, 1)])[guesses]
    judged = guesses[is_judged].unsqueeze(1)
    count = len(judged)
    kept = keep(COIN.expand(count, 1, 3), GUESSED.expand(count, 1, 3), judged, numbers.uniform(count, 1))
    own = numbers.drawn(kept.weights)
    found = torch.where(kept.num_kept > 0, judged[:, 0], own)
    plain = numbers.drawn(COIN.expand(SAMPLES - count, 3))
    return np.bincount(torch.cat([found, plain]).numpy(), minlength=3)


def passes(found: np.ndarray, *expected: float) -> bool:
    statistic, limit = chi_square(found, np.array(expected))
    return statistic < limit


@pytest.mark.parametrize("keep", RULES)
def test_the_best_length_by_this_steps_survival_leaks_the_guess(keep: Keep) -> None:
    lengths = {token: best_capacity([curve], SECONDS.__getitem__)[0] for token, curve in SURVIVAL.items()}
    assert lengths == {0: 2, 1: 0}
    found = first_tokens(keep, lengths)
    assert passes(found, 0.85, 0.15, 0.0)
    assert not passes(found, 0.7, 0.3, 0.0)


@pytest.mark.parametrize("keep", RULES)
def test_the_synchronous_rule_does_not(keep: Keep) -> None:
    for seconds in (SECONDS, {1: 1.0, 2: 1.5, 3: 2.0}, {1: 1.0, 2: 1.1, 3: 1.2}):
        lengths = {token: synchronous_lengths([curve], seconds.__getitem__)[0] for token, curve in SURVIVAL.items()}
        assert passes(first_tokens(keep, lengths), 0.7, 0.3, 0.0)
    assert lengths == {0: 2, 1: 1}


@pytest.mark.parametrize("keep", RULES)
@pytest.mark.parametrize("past", [SURVIVAL[0], SURVIVAL[1]])
def test_the_capacity_of_two_steps_ago_does_not(keep: Keep, past: tuple[float, ...]) -> None:
    lengths = {}
    for token, curve in SURVIVAL.items():
        rule = StaleCapacity()
        for before in (past, SURVIVAL[1 - token]):
            rule.lengths({"a": before}, SECONDS.__getitem__)
        lengths[token] = rule.lengths({"a": curve}, SECONDS.__getitem__)["a"]
    assert passes(first_tokens(keep, lengths), 0.7, 0.3, 0.0)
