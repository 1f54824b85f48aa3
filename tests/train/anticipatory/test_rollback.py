"""The rollback machine, driven by any sequence of alarms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.train.anticipatory import Decision, RollbackSettings, RollbackState, after_step

SETTINGS = RollbackSettings(snapshot_every=5, keep=3, settle=2, anticipate_steps=8, max_rollbacks=3)


def drive(alarms: list[bool], settings: RollbackSettings) -> list[tuple[int, RollbackState, Decision]]:
    """Run the machine as a loop would: a rollback sets the steps done back. Returns what followed every step."""
    state, step, history = RollbackState.begin(0), 0, []
    for has_alarm in alarms:
        step += 1
        state, decision = after_step(state, step, settings, has_alarm=has_alarm)
        history.append((step, state, decision))
        if decision.action == "give_up":
            break
        if decision.action == "roll_back":
            step = decision.step
    return history


settings_of_any_kind = st.builds(
    RollbackSettings,
    snapshot_every=st.integers(1, 7),
    keep=st.integers(1, 4),
    settle=st.integers(0, 4),
    anticipate_steps=st.integers(0, 12),
    max_rollbacks=st.integers(1, 4),
)
any_alarms = st.lists(st.sampled_from([False] * 6 + [True]), max_size=120)


@given(any_alarms, settings_of_any_kind)
def test_snapshots_are_bounded_rise_and_lie_in_the_past(alarms: list[bool], settings: RollbackSettings) -> None:
    for step, state, _ in drive(alarms, settings):
        assert 1 <= len(state.snapshots) <= settings.keep
        assert list(state.snapshots) == sorted(set(state.snapshots))
        assert state.snapshots[-1] <= step


@given(any_alarms, settings_of_any_kind)
def test_a_rollback_goes_to_a_snapshot_that_exists_and_had_settled(
    alarms: list[bool], settings: RollbackSettings
) -> None:
    known = (0,)
    for step, state, decision in drive(alarms, settings):
        if decision.action == "roll_back":
            assert decision.step in known
            assert decision.step <= step - settings.settle
            assert state.snapshots[-1] == decision.step  # newer ones hold the spike's future
        elif decision.action == "snapshot":
            assert decision.step == step == state.snapshots[-1]
        known = state.snapshots


@given(any_alarms, settings_of_any_kind)
def test_only_an_alarm_rolls_back_or_gives_up(alarms: list[bool], settings: RollbackSettings) -> None:
    history = drive(alarms, settings)
    answers = {"roll_back", "give_up"}
    assert [d.action in answers for _, _, d in history] == alarms[: len(history)]


@given(any_alarms, settings_of_any_kind)
def test_anticipation_lasts_exactly_its_steps_after_a_rollback(alarms: list[bool], settings: RollbackSettings) -> None:
    begun: int | None = None
    for step, state, decision in drive(alarms, settings):
        if decision.action == "roll_back":
            begun = decision.step
        position = decision.step if decision.action == "roll_back" else step
        expected = begun is not None and position < begun + settings.anticipate_steps
        if decision.action != "give_up":
            assert state.is_anticipating == expected


@given(settings_of_any_kind)
def test_alarms_at_the_same_place_end_in_giving_up(settings: RollbackSettings) -> None:
    state, step, rollbacks = RollbackState.begin(0), 0, 0
    for _ in range(1000):
        step += 1
        state, decision = after_step(state, step, settings, has_alarm=step == 30)
        if decision.action == "roll_back":
            step, rollbacks = decision.step, rollbacks + 1
        if decision.action == "give_up":
            break
    assert decision.action == "give_up"
    assert rollbacks <= settings.max_rollbacks


def test_a_second_alarm_goes_back_further() -> None:
    for quiet in (0, 1, 3):  # steps between the rollback and the second alarm
        alarms = [False] * 16 + [True] + [False] * quiet + [True]
        assert [d.step for _, _, d in drive(alarms, SETTINGS) if d.action == "roll_back"] == [15, 10]


def test_getting_past_a_spike_makes_the_next_one_a_new_one() -> None:
    alarms = [False] * 17 + [True] + [False] * 40 + [True]
    history = drive(alarms, SETTINGS)
    assert [s.rollbacks for _, s, d in history if d.action == "roll_back"] == [1, 1]
    assert not history[-2][1].is_anticipating


def test_an_alarm_before_any_snapshot_has_settled_gives_up() -> None:
    assert drive([True], SETTINGS)[-1][2].action == "give_up"
    assert drive([False, True], SETTINGS)[-1][2] == Decision("roll_back", 0)


def test_the_same_history_gives_the_same_decisions() -> None:
    alarms = [step % 23 == 0 for step in range(1, 90)]
    assert drive(alarms, SETTINGS) == drive(alarms, SETTINGS)


@pytest.mark.parametrize(
    "change", [{"snapshot_every": 0}, {"keep": 0}, {"settle": -1}, {"anticipate_steps": -1}, {"max_rollbacks": 0}]
)
def test_counts_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        RollbackSettings(**change)
