"""Detector, snapshots and rollback in a loop: what comes back is what was there, and the run goes on from it."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.anticipatory import Observation, RollbackSettings, Stability
from headrace.train.anticipatory.stability import copy_tree

SETTINGS = RollbackSettings(snapshot_every=10, keep=3, settle=2, anticipate_steps=15, max_rollbacks=2)


class Walk:
    """A loop in small: a weight that moves by a number of the place in the data; it blows up while not anticipating."""

    def __init__(self, bad: range = range(0)) -> None:
        self.weight = torch.zeros(3)
        self.place, self.bad = 0, bad
        self.trained: list[tuple[int, bool]] = []
        self.stability = Stability(self.capture, self.restore, settings=SETTINGS)

    def capture(self) -> dict[str, Any]:
        return {"weight": self.weight, "nested": [{"place": self.place}], "pair": (self.weight, 1)}

    def restore(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])
        self.place = state["nested"][0]["place"]

    def step(self) -> str:
        is_anticipating = self.stability.is_anticipating
        is_bad = self.place in self.bad and not is_anticipating
        self.weight += self.place
        self.trained.append((self.place, is_anticipating))
        self.place += 1
        loss = 9.0 if is_bad else 2.0 + 0.01 * (self.place % 3)
        return self.stability.after_step(self.place, Observation(loss, 1.0)).action


def walk(steps: int, bad: range = range(0)) -> Walk:
    loop = Walk(bad)
    loop.stability.begin(0)
    for _ in range(steps):
        if loop.step() == "give_up":
            break
    return loop


def expected_weight(steps: int) -> Tensor:
    return torch.full((3,), float(sum(range(steps))))


def test_a_quiet_run_keeps_the_last_snapshots_and_never_anticipates() -> None:
    loop = walk(47)
    assert loop.stability.snapshots == (20, 30, 40)
    assert loop.trained == [(place, False) for place in range(47)]


def test_a_spike_goes_back_and_the_same_data_is_trained_with_anticipation() -> None:
    loop = walk(60, bad=range(44, 60))
    places = [place for place, _ in loop.trained]
    back = places.index(45) + 1
    assert places[:back] == list(range(46))  # the second suspicious loss is the alarm
    assert places[back] == 40
    assert loop.trained[back : back + 14] == [(place, True) for place in range(40, 54)]
    assert torch.equal(loop.weight, expected_weight(loop.place))


def test_a_rollback_also_takes_back_what_the_detector_learnt() -> None:
    loop = Walk(range(44, 46))
    loop.stability.begin(0)
    actions, pasts = [], {}
    while "roll_back" not in actions:
        actions.append(loop.step())
        pasts[len(actions)] = loop.stability.state()["detector"]
    assert loop.stability.state()["detector"] == pasts[40]
    assert pasts[45] != pasts[40]


def test_a_snapshot_is_unchanged_by_what_happens_after_it() -> None:
    loop = walk(60, bad=range(44, 46))
    assert torch.equal(loop.weight, expected_weight(loop.place))
    payload, _ = loop.stability._snapshots[loop.stability.snapshots[-1]]
    before = payload["weight"].clone()
    loop.weight += 100.0
    assert torch.equal(payload["weight"], before)


def test_a_spike_that_stays_ends_the_run() -> None:
    loop = Walk()
    loop.stability.begin(0)
    actions = []
    for _ in range(200):
        loop.weight += loop.place
        loop.place += 1
        loss = 9.0 if loop.place >= 44 else 2.0
        actions.append(loop.stability.after_step(loop.place, Observation(loss, 1.0)).action)
        if actions[-1] == "give_up":
            break
    assert [action for action in actions if action in {"roll_back", "give_up"}] == ["roll_back", "roll_back", "give_up"]
    assert loop.stability.last_alarm is not None


@pytest.mark.parametrize("stop", [39, 41, 45, 50, 57])
def test_a_resumed_run_judges_and_answers_as_the_one_that_stopped(stop: int) -> None:
    """It stops before the spike, within it, while anticipating, and after."""
    straight = walk(75, bad=range(44, 46))
    stopped = walk(stop, bad=range(44, 46))
    assert stopped.stability.is_anticipating == (stop in {50, 57})
    resumed = Walk(range(44, 46))
    resumed.restore(copy_tree(stopped.capture()))
    resumed.stability.load(json.loads(json.dumps(stopped.stability.state())), stopped.stability.captured())
    for _ in range(75 - stop):
        resumed.step()
    assert stopped.trained + resumed.trained == straight.trained
    assert torch.equal(resumed.weight, straight.weight)
    assert resumed.stability.state() == straight.stability.state()
    assert resumed.stability.snapshots == straight.stability.snapshots


def test_a_damaged_state_is_refused() -> None:
    loop = walk(5)
    state, captured = loop.stability.state(), loop.stability.captured()
    damaged = [
        ({"detector": state["detector"]}, captured),
        (state | {"rollback": {"snapshots": [0], "other": 1}}, captured),
        (state, {}),
        (state | {"pasts": {}}, captured),
    ]
    for found, states in damaged:
        with pytest.raises(UserError, match="rollback is damaged"):
            Walk().stability.load(found, states)


def test_copies_share_no_memory() -> None:
    tree = {"a": [torch.zeros(2), {"b": torch.ones(1)}], "c": (torch.zeros(1), "text"), "d": {1, 2}}
    copied = copy_tree(tree)
    tree["a"][0] += 1.0  # type: ignore[index]
    tree["d"].add(3)  # type: ignore[union-attr]
    assert copied["a"][0].tolist() == [0.0, 0.0]
    assert copied["c"][1] == "text"
    assert copied["d"] == {1, 2}
