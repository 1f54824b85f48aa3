"""The detector fires on what the limits say and on nothing else, and goes on exactly after a restore."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.anticipatory import Detector, DetectorSettings, Observation


def noisy(step: int, generator: random.Random) -> Observation:
    """Return an ordinary step of a falling loss."""
    return Observation(
        loss=3.0 - 0.001 * step + generator.gauss(0.0, 0.05),
        grad_norm=0.8 + generator.random() * 0.4,
        outlier=20.0 + generator.random() * 10.0,
    )


def warm(steps: int = 250, seed: int = 0) -> Detector:
    detector, generator = Detector(), random.Random(seed)
    for step in range(steps):
        assert detector.observe(noisy(step, generator)) is None
    return detector


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_steps_raise_no_alarm(seed: int) -> None:
    warm(1000, seed)


def test_two_suspicious_losses_in_a_row_are_an_alarm_and_one_is_not() -> None:
    detector = warm()
    assert detector.observe(Observation(5.0, 1.0, 25.0)) is None
    assert detector.observe(Observation(2.8, 1.0, 25.0)) is None
    assert detector.observe(Observation(5.0, 1.0, 25.0)) is None
    alarm = detector.observe(Observation(5.0, 1.0, 25.0))
    assert alarm is not None
    assert (alarm.reason, alarm.value) == ("loss", 5.0)
    assert 3.0 < alarm.limit < 3.6
    assert str(alarm).startswith("loss 5, above 3.")


def test_a_loss_that_falls_suddenly_is_no_alarm() -> None:
    detector = warm()
    assert all(detector.observe(Observation(0.1, 1.0, 25.0)) is None for _ in range(5))


def test_loss_limit_is_six_robust_deviations() -> None:
    """Losses 0 and 2 in turn: median 1, median deviation 1, so the limit is 1 + 6 * 1.4826."""
    settings = DetectorSettings(loss_repeats=1, min_history=100)
    for loss, fires in ((9.89, False), (9.90, True)):
        detector = Detector(settings)
        for step in range(100):
            detector.observe(Observation(2.0 * (step % 2), 1.0))
        assert (detector.observe(Observation(loss, 1.0)) is not None) == fires


@pytest.mark.parametrize(
    ("reason", "factor", "observation"),
    [
        ("gradient norm", 5.0, lambda value: Observation(1.0, value, 1.0)),
        ("outlier", 10.0, lambda value: Observation(1.0, 1.0, value)),
    ],
)
def test_averages_are_held_against_their_multiples(
    reason: str, factor: float, observation: Callable[[float], Observation]
) -> None:
    detector = Detector()
    for _ in range(60):
        assert detector.observe(observation(1.0)) is None
    alarm = detector.observe(observation(factor * 1.001))
    assert alarm is not None
    assert alarm.reason == reason
    assert alarm.limit == pytest.approx(factor)
    assert detector.observe(observation(factor * 0.999)) is None


def test_values_that_raise_an_alarm_do_not_become_the_past() -> None:
    detector = warm()
    first = detector.observe(Observation(2.8, 100.0, 25.0))
    again = detector.observe(Observation(2.8, 100.0, 25.0))
    assert first is not None
    assert again is not None
    assert again.limit == first.limit


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_values_that_are_not_finite_are_an_alarm_from_the_first_step(bad: float, place: int) -> None:
    values = [1.0, 1.0, 1.0]
    values[place] = bad
    alarm = Detector().observe(Observation(*values))
    assert alarm is not None
    assert alarm.reason == "not finite"


def test_a_flat_loss_does_not_make_noise_a_spike() -> None:
    detector = Detector(DetectorSettings(loss_repeats=1))
    for _ in range(50):
        detector.observe(Observation(2.0, 1.0))
    assert detector.observe(Observation(2.005, 1.0)) is None
    assert detector.observe(Observation(2.007, 1.0)) is not None


def test_there_is_no_alarm_before_there_is_a_past() -> None:
    detector = Detector()
    for step in range(19):
        assert detector.observe(Observation(10.0**step, 10.0**step, 10.0**step)) is None


def test_losses_of_two_kinds_of_batches_are_no_spikes() -> None:
    """Eight of ten batches are easy: the others are far above the median, but never for long enough."""
    detector, generator = Detector(DetectorSettings(loss_repeats=3)), random.Random(1)
    for step in range(400):
        loss = 3.0 if step % 10 in {3, 7} else 1.0
        assert detector.observe(Observation(loss + generator.gauss(0.0, 0.02), 1.0)) is None


def test_an_outlier_that_is_not_measured_is_not_judged() -> None:
    detector = Detector()
    assert all(detector.observe(Observation(1.0, 1.0)) is None for _ in range(50))


def test_another_phase_begins_a_new_past() -> None:
    """The gradient norm of an indexer alone says nothing about that of all parameters."""
    detector = warm()
    later = [Observation(5.0, 40.0, 900.0, phase=1) for _ in range(60)]
    assert all(detector.observe(observation) is None for observation in later)
    assert detector.observe(Observation(5.0, 300.0, 900.0, phase=1)) is not None
    assert detector.observe(Observation(float("nan"), 1.0, phase=2)) is not None


@given(st.integers(0, 60), st.integers(0, 2**20))
def test_a_restored_detector_judges_alike(cut: int, seed: int) -> None:
    generator = random.Random(seed)
    steps = [
        Observation(*(v * (20.0 if generator.random() < 0.1 else 1.0) for v in (generator.random() + 1.0, 1.0, 3.0)))
        for _ in range(80)
    ]
    straight = Detector()
    for observation in steps[:cut]:
        straight.observe(observation)
    resumed = Detector()
    resumed.restore(straight.state())
    assert [straight.observe(o) for o in steps[cut:]] == [resumed.observe(o) for o in steps[cut:]]
    assert straight.state() == resumed.state()


@pytest.mark.parametrize("damage", ["losses", "averages", "suspicious", "phase"])
def test_a_damaged_state_is_refused(damage: str) -> None:
    state = Detector().state()
    del state[damage]
    with pytest.raises(UserError, match="spike detector is damaged"):
        Detector().restore(state)


@pytest.mark.parametrize("change", [{"window": 0}, {"loss_limit": -1.0}, {"decay": 1.0}, {"min_spread": 0.0}])
def test_limits_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        DetectorSettings(**change)  # type: ignore[arg-type]
