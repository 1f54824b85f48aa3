"""When to take a snapshot, when to go back to which one, and how long to anticipate afterwards: pure values.

A snapshot is named by the number of steps done before it. The loop carries decisions out.
"""

from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RollbackSettings:
    """How to answer spikes.

    Attributes:
        snapshot_every: steps between snapshots.
        keep: snapshots kept.
        settle: steps that must pass without an alarm before a snapshot counts as good; a spike is often seen a step or
            two after it began.
        anticipate_steps: steps of anticipatory routing after a rollback; 0 goes back and changes nothing else.
        max_rollbacks: rollbacks without getting past the spike before the run gives up.
    """

    snapshot_every: int = 25
    keep: int = 3
    settle: int = 2
    anticipate_steps: int = 50
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        """Refuse counts outside their range.

        Raises:
            UserError: names the count.
        """
        for name, low in (
            ("snapshot_every", 1),
            ("keep", 1),
            ("settle", 0),
            ("anticipate_steps", 0),
            ("max_rollbacks", 1),
        ):
            value = getattr(self, name)
            if value < low:
                raise UserError(f"Rollback {name} is {value}; {low} or more is accepted.", param=name)


@dataclass(frozen=True, kw_only=True)
class RollbackState:
    """Where the machine is.

    Attributes:
        snapshots: snapshots there are, rising.
        anticipating_until: steps done at which anticipation ends; None when it is off.
        alarm: steps done at the latest alarm that is not left behind yet; None without one.
        target: snapshot of the latest rollback for it.
        rollbacks: rollbacks for it.
    """

    snapshots: tuple[int, ...]
    anticipating_until: int | None = None
    alarm: int | None = None
    target: int | None = None
    rollbacks: int = 0

    @classmethod
    def begin(cls, step: int) -> "RollbackState":
        """Return the state of a run that begins, or resumes, with a snapshot of its first state."""
        return cls(snapshots=(step,))

    @property
    def is_anticipating(self) -> bool:
        """Whether the next step uses experts chosen earlier."""
        return self.anticipating_until is not None


@dataclass(frozen=True)
class Decision:
    """What the loop does now; `step` names the snapshot to take or to go back to."""

    action: Literal["go_on", "snapshot", "roll_back", "give_up"]
    step: int


def after_step(
    state: RollbackState, step: int, settings: RollbackSettings, *, has_alarm: bool
) -> tuple[RollbackState, Decision]:
    """Decide after a step.

    Args:
        state: before.
        step: steps done, this one included.
        settings: see there.
        has_alarm: whether the detector fired on this step.

    Returns:
        The state after the loop has done what the decision says, and the decision.

    State: none; the same arguments give the same answer.
    """
    if has_alarm:
        return _answer(state, step, settings)
    if state.anticipating_until is not None and step >= state.anticipating_until:
        state = replace(state, anticipating_until=None)
    if state.alarm is not None and not state.is_anticipating and step >= state.alarm + settings.snapshot_every:
        state = replace(state, alarm=None, target=None, rollbacks=0)  # past the spike: the next one is a new one
    if step % settings.snapshot_every or step in state.snapshots:
        return state, Decision("go_on", step)
    kept = (*state.snapshots, step)[-settings.keep :]
    return replace(state, snapshots=kept), Decision("snapshot", step)


def _answer(state: RollbackState, step: int, settings: RollbackSettings) -> tuple[RollbackState, Decision]:
    """Go back to the newest good snapshot; to an older one if that did not help the last time."""
    good = [snapshot for snapshot in state.snapshots if snapshot <= step - settings.settle]
    if not good or state.rollbacks >= settings.max_rollbacks:
        return state, Decision("give_up", step)
    if state.target == good[-1] and len(good) > 1:
        good.pop()
    target = good[-1]
    until = target + settings.anticipate_steps if settings.anticipate_steps else None
    after = RollbackState(
        snapshots=tuple(good),
        anticipating_until=until,
        alarm=max(step, state.alarm or 0),
        target=target,
        rollbacks=state.rollbacks + 1,
    )
    return after, Decision("roll_back", target)
