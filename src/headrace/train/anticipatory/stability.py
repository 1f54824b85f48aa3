"""Detector, snapshots and rollback put together for a loop: one call after every step."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from headrace.core.errors import UserError
from headrace.train.anticipatory.detector import Alarm, Detector, DetectorSettings, Observation
from headrace.train.anticipatory.rollback import Decision, RollbackSettings, RollbackState, after_step


def copy_tree(value: Any) -> Any:
    """Return a copy that shares no memory: tensors in nested dicts, lists and tuples cloned, the rest deep-copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copy_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_tree(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_tree(item) for item in value)
    return deepcopy(value)


class Stability:
    """Owns the detector's past and the snapshots in memory.

    A snapshot is what the loop's `capture` returns: parameters, states of the optimizer, routing biases, random
    numbers, the place in the data and the look-ahead queue. Snapshots are saved with a run, so that one that resumes
    goes back to where the one that stopped would have gone.

    State: as above.
    """

    def __init__(
        self,
        capture: Callable[[], Any],
        restore: Callable[[Any], None],
        *,
        settings: RollbackSettings | None = None,
        detector: DetectorSettings | None = None,
    ) -> None:
        """Do nothing yet; `begin` comes next.

        Args:
            capture: returns the state of the loop as nested dicts, lists, tuples, tensors and plain values.
            restore: takes such a state over.
            settings: answers to spikes.
            detector: limits of the detector.
        """
        self._capture, self._restore = capture, restore
        self._settings = settings or RollbackSettings()
        self._detector = Detector(detector)
        self._state = RollbackState.begin(0)
        self._snapshots: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.last_alarm: Alarm | None = None

    @property
    def is_anticipating(self) -> bool:
        """Whether the next step uses experts chosen earlier."""
        return self._state.is_anticipating

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Steps done at the snapshots there are."""
        return tuple(self._snapshots)

    def begin(self, step: int) -> None:
        """Take the first snapshot of a new run, with `step` steps done."""
        self._state = RollbackState.begin(step)
        self._snapshots = {}
        self._take(step)

    def after_step(self, step: int, observation: Observation) -> Decision:
        """Judge a step and carry out what follows: take a snapshot, or go back to one.

        After "roll_back" the loop stands where it stood with `Decision.step` steps done; after "give_up" it is
        unchanged and should stop.

        Args:
            step: steps done, this one included.
            observation: what it showed.
        """
        self.last_alarm = self._detector.observe(observation)
        self._state, decision = after_step(self._state, step, self._settings, has_alarm=self.last_alarm is not None)
        if decision.action == "snapshot":
            self._take(step)
        elif decision.action == "roll_back":
            payload, past = self._snapshots[decision.step]
            self._restore(copy_tree(payload))
            self._detector.restore(past)
        self._snapshots = {kept: self._snapshots[kept] for kept in self._state.snapshots}
        return decision

    def _take(self, step: int) -> None:
        self._snapshots[step] = (copy_tree(self._capture()), self._detector.state())

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge and answer as this one would, beside `captured`: plain values."""
        pasts = {str(step): past for step, (_, past) in self._snapshots.items()}
        return {"detector": self._detector.state(), "rollback": asdict(self._state), "pasts": pasts}

    def captured(self) -> dict[int, Any]:
        """Return the captured states of the snapshots there are; they are not copied and nobody may change them."""
        return {step: payload for step, (payload, _) in self._snapshots.items()}

    def load(self, state: Mapping[str, Any], captured: Mapping[int, Any]) -> None:
        """Take over a saved state and its snapshots.

        Raises:
            UserError: it is no such state, or a snapshot is missing.
        """
        try:
            rollback = dict(state["rollback"])
            loaded = RollbackState(**{**rollback, "snapshots": tuple(rollback["snapshots"])})
            snapshots = {step: (captured[step], state["pasts"][str(step)]) for step in loaded.snapshots}
            self._detector.restore(state["detector"])
        except (KeyError, TypeError) as problem:
            raise UserError(f"The saved state of the rollback is damaged: {problem!r}.") from problem
        self._state, self._snapshots = loaded, snapshots
