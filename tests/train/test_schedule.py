"""Schedules at their borders, against the published numbers and in between."""

from collections.abc import Callable
from itertools import pairwise
from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.published import PUBLISHED, TRILLION, V4_FLASH, V4_PRO, V41_FLASH
from headrace.train.schedule import BatchRamp, Constant, Cosine, LearningRate, Position, Staircase, Warmup

SMALL = LearningRate(
    warmup=Warmup(steps=100),
    parts=(
        Constant(value=3e-3, until=600),
        Cosine(first=3e-3, last=3e-4, until=950),
        Constant(value=3e-4, until=1000),
    ),
)


def at_tokens(tokens: int) -> Position:
    return Position(steps=1_000_000, tokens=tokens)


def at_step(steps: int) -> Position:
    return Position(steps=steps, tokens=0)


def test_small_schedule_at_its_borders() -> None:
    rates = {step: SMALL.at(at_step(step)) for step in (0, 49, 99, 100, 599, 600, 775, 949, 950, 999, 1000, 5000)}
    assert rates[0] == pytest.approx(3e-5)
    assert rates[49] == pytest.approx(1.5e-3)
    assert rates[99] == rates[100] == rates[599] == 3e-3
    assert rates[600] == pytest.approx(3e-3)
    assert rates[775] == pytest.approx((3e-3 + 3e-4) / 2)
    assert rates[949] == pytest.approx(3e-4, rel=1e-3)
    assert rates[950] == rates[999] == rates[1000] == rates[5000] == 3e-4


def test_cosine_is_half_a_cosine() -> None:
    part = LearningRate(warmup=Warmup(steps=0), parts=(Cosine(first=1.0, last=0.2, until=80),))
    assert [part.at(at_step(s)) for s in (0, 13, 40, 80, 100)] == pytest.approx(
        [1.0, 0.2 + 0.4 * (1 + cos(pi * 13 / 80)), 0.6, 0.2, 0.2]
    )


@given(st.integers(0, 1100))
def test_rate_never_jumps_and_only_falls_after_the_warm_up(step: int) -> None:
    here, after = SMALL.at(at_step(step)), SMALL.at(at_step(step + 1))
    assert abs(after - here) <= 3e-5 + 1e-12
    assert after <= here or step < 100


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (int(0.5 * TRILLION), 2.6e-4),
        (28 * TRILLION - 1, 2.6e-4),
        (28 * TRILLION, 2.6e-4),
        (34 * TRILLION, (2.6e-4 + 2.6e-5) / 2),
        (40 * TRILLION, 2.6e-5),
        (43 * TRILLION, 2.6e-5),
        (45 * TRILLION, 2.6e-5),
    ],
)
def test_v41_rate_at_the_published_borders(tokens: int, rate: float) -> None:
    assert V41_FLASH.learning_rate().at(at_tokens(tokens)) == pytest.approx(rate, rel=1e-9)


def test_warm_up_of_the_released_models_takes_2000_steps() -> None:
    rate = V41_FLASH.learning_rate()
    batch = V41_FLASH.batch().at(Position(steps=0, tokens=0), 65536) * 65536
    values = [rate.at(Position(steps=step, tokens=step * batch)) for step in (0, 999, 1999, 2000)]
    assert values == pytest.approx([2.6e-4 / 2000, 1.3e-4, 2.6e-4, 2.6e-4])


def test_v41_batch_is_constant_and_sequences_start_at_64k() -> None:
    ramp = V41_FLASH.batch()
    assert {ramp.at(at_tokens(t), 65536) for t in (0, TRILLION, 44 * TRILLION)} == {100_600_000 // 65536}
    lengths = V41_FLASH.sequence_length()
    assert [lengths.at(at_tokens(t)) for t in (0, 34 * TRILLION - 1, 34 * TRILLION)] == [65536, 65536, 1024**2]


@pytest.mark.parametrize(
    ("published", "peak", "final", "batch", "tokens"),
    [(V4_FLASH, 2.7e-4, 2.7e-5, 75.5e6, 32), (V4_PRO, 2.0e-4, 2.0e-5, 94.4e6, 33)],
)
def test_v4_settings_are_the_published_ones(published, peak, final, batch, tokens) -> None:  # type: ignore[no-untyped-def]
    rate = published.learning_rate(decay_start=25 * TRILLION, decay_end=tokens * TRILLION)
    assert rate.at(at_tokens(25 * TRILLION)) == pytest.approx(peak)
    assert rate.at(at_tokens(tokens * TRILLION)) == pytest.approx(final)
    assert published.tokens == tokens * TRILLION
    assert published.batch(first=1_000_000, until=TRILLION).at(at_tokens(2 * TRILLION), 1) == batch
    assert published.lengths == (4096, 16384, 65536, 1048576)
    assert (published.warmup_steps, published.bias_speed, published.balance_weight) == (2000, 1e-3, 1e-4)
    weight = published.next_token_weight(decay_start=25 * TRILLION)
    assert [weight.at(at_tokens(t)) for t in (0, 25 * TRILLION - 1, 25 * TRILLION)] == [0.3, 0.3, 0.1]


def test_v41_has_no_next_token_loss_and_freezes_the_tower_but_its_last_norm() -> None:
    assert V41_FLASH.next_token_weight().at(at_tokens(0)) == 0.0
    assert V41_FLASH.frozen_until_decay
    assert not any(
        name.startswith("vision.norm") or name.startswith("aligner") for name in V41_FLASH.frozen_until_decay
    )
    assert V41_FLASH.has_image_bias
    assert (V41_FLASH.tokens, V41_FLASH.dense_tokens) == (45 * TRILLION, 0)


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (V4_FLASH.learning_rate, "No report states decay_start"),
        (lambda: V4_FLASH.learning_rate(decay_start=TRILLION), "No report states decay_end"),
        (lambda: V41_FLASH.learning_rate(decay_start=1), "decay_start is published as 28000000000000"),
        (V4_PRO.batch, "No report states first"),
        (V4_PRO.sequence_length, "3 sequence lengths have no published start and 0 were given"),
        (V4_FLASH.next_token_weight, "No report states decay_start"),
    ],
)
def test_what_no_report_states_is_never_filled_in_silently(build: Callable[[], object], part: str) -> None:
    with pytest.raises(UserError, match=part):
        build()


def test_open_lengths_are_filled_in_order() -> None:
    lengths = V4_FLASH.sequence_length(TRILLION // 2, TRILLION, 30 * TRILLION)
    assert [int(lengths.at(at_tokens(t * TRILLION // 2))) for t in (0, 1, 2, 60)] == [4096, 16384, 65536, 1048576]


def test_every_published_model_has_a_table_of_update_rules() -> None:
    from headrace.train.optim.rules import FAMILIES

    assert {settings.family for settings in PUBLISHED.values()} == set(FAMILIES)


@given(st.integers(1, 2000), st.integers(0, 5000), st.integers(0, 10_000))
def test_a_batch_ramp_grows_in_whole_sequences_up_to_its_end(first: int, more: int, until: int) -> None:
    ramp = BatchRamp(first=first, last=first + more, until=until)
    counts = [ramp.at(at_tokens(tokens), 64) for tokens in range(0, until + 200, max(1, until // 50))]
    assert counts[-1] == max(1, (first + more) // 64)
    assert all(1 <= a <= b for a, b in pairwise(counts))
    if until:
        assert counts[0] == max(1, first // 64)


def test_a_staircase_changes_exactly_at_its_borders() -> None:
    stairs = Staircase(starts=(0, 10, 25), values=(256.0, 512.0, 1024.0))
    assert [stairs.at(at_step(s)) for s in (0, 9, 10, 24, 25, 10**9)] == [256, 256, 512, 512, 1024, 1024]


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: LearningRate(warmup=Warmup(steps=-1), parts=SMALL.parts), "Warm-up of -1"),
        (lambda: LearningRate(warmup=Warmup(steps=0), parts=()), "at least one part"),
        (lambda: LearningRate(warmup=Warmup(steps=0), parts=SMALL.parts[::-1]), "rising numbers"),
        (lambda: LearningRate(warmup=Warmup(steps=0), parts=SMALL.parts, unit="hours"), "unit is 'hours'"),  # type: ignore[arg-type]
        (lambda: LearningRate(warmup=Warmup(steps=0), parts=(Constant(value=-1.0, until=5),)), "rate is -1.0"),
        (lambda: Staircase(starts=(1,), values=(1.0,)), "first start of 0"),
        (lambda: Staircase(starts=(0, 5), values=(1.0,)), "one value per start"),
        (lambda: Staircase(starts=(0, 5, 5), values=(1.0, 2.0, 3.0)), "rising numbers"),
        (lambda: BatchRamp(first=5, last=4, until=0), "a growing batch"),
        (lambda: BatchRamp(first=0, last=4, until=0), "a growing batch"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(build: Callable[[], object], part: str) -> None:
    with pytest.raises(UserError, match=part):
        build()
