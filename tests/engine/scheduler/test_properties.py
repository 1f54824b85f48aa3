"""Random lives of many requests: a simulated core carries out and checks every plan; here are the rules over time."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import CapacityError
from headrace.engine.scheduler.config import SchedulerConfig
from headrace.engine.scheduler.entry import EndReason, Entry, Phase, WaitReason
from headrace.engine.scheduler.plan import StepPlan
from headrace.engine.scheduler.request import Request
from headrace.engine.scheduler.scheduler import OverloadedError, Scheduler
from tests.engine.scheduler.simulated_core import SimulatedCore

LACKING = {
    WaitReason.SLOTS, WaitReason.BLOCKS, WaitReason.HEADROOM, WaitReason.PROMISE, WaitReason.PARTIAL, WaitReason.HOST,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Life:
    """One request and what happens to it; times are steps after the one in which it is submitted."""

    delay: int
    stem: int
    shared: int
    own: int
    max_new_tokens: int
    priority: int
    children: int
    mode: str
    deadline: int | None
    cancel: int | None
    stop: int | None
    drafts: int


lives = st.builds(
    Life,
    delay=st.integers(0, 4),
    stem=st.integers(0, 1),
    shared=st.integers(0, 17),
    own=st.integers(1, 9),
    max_new_tokens=st.integers(0, 14),
    priority=st.sampled_from([0, 0, 0, 1, 2]),
    children=st.sampled_from([0, 0, 0, 1, 2]),
    mode=st.sampled_from(["replay", "replay", "replay", "full"]),
    deadline=st.none() | st.none() | st.integers(0, 30),
    cancel=st.none() | st.none() | st.integers(0, 30),
    stop=st.none() | st.none() | st.integers(1, 10),
    drafts=st.sampled_from([0, 0, 1, 3, 5]),
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    window, slots = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return SchedulerConfig(
        window=window,
        num_blocks=draw(st.integers(4, 24)),
        num_slots=slots,
        max_rows=window + slots + draw(st.integers(0, 14)),
        chunk=draw(st.integers(1, 12)),
        max_waiting=draw(st.sampled_from([2, 50])),
        max_context=60,
        block_bytes=10,
        slot_bytes=7,
        host_bytes=draw(st.sampled_from([0, 7, 30, 60, 1000])),
        block_tokens=4,
        max_partial=draw(st.integers(1, 3)),
        long_rows=draw(st.none() | st.integers(1, 6)),
        prefill_rows=draw(st.none() | st.integers(window, window + 5)),
        patience=draw(st.integers(1, 4)),
        headroom_blocks=draw(st.integers(0, 2)),
    )


class Run:
    """A scheduler, a core, and the events of a list of lives."""

    def __init__(self, config: SchedulerConfig, script: list[Life], *, resume_everywhere: bool) -> None:
        self.scheduler = Scheduler(config)
        self.core = SimulatedCore(self.scheduler, {}, resume_everywhere)
        self.script, self.refused, self.rows, self.plans = script, 0, 0, list[StepPlan]()
        self.events: list[tuple[int, str, EndReason]] = []
        self.submitted: list[str] = []
        self.stops: dict[str, int] = {}

    def submit(self, now: int, number: int, life: Life) -> None:
        name = f"r{number}"
        prompt = tuple(100 * life.stem + i for i in range(life.shared)) + tuple(
            10_000 * (number + 1) + i for i in range(life.own)
        )
        request = Request(
            request_id=name,
            arrival=number,
            prompt_tokens=len(prompt),
            max_new_tokens=life.max_new_tokens,
            priority=life.priority,
            deadline=None if life.deadline is None else float(now + life.deadline),
            mode=life.mode,
            children=tuple(f"{name}.{i}" for i in range(life.children)),
        )
        try:
            self.scheduler.submit(request)
        except (CapacityError, OverloadedError):
            self.refused += 1
            return
        self.core.prompts[name] = prompt
        family = [name, *request.children]
        self.submitted += family
        self.rows += len(prompt) + len(family) * life.max_new_tokens
        if life.cancel is not None:
            self.events.append((now + life.cancel, family[life.own % len(family)], EndReason.CANCELLED))
        self.core.drafts |= dict.fromkeys(family, life.drafts)
        if life.stop is not None:
            self.stops[family[-1]] = life.stop

    def step(self, now: int) -> StepPlan:
        for at, name, reason in self.events:
            if at == now:
                self.scheduler.finish(name, reason)
        for name, count in self.stops.items():
            entry = self.scheduler.entry(name)
            if entry is not None and entry.generated >= count and entry.phase is Phase.DECODE:
                self.scheduler.finish(name)
        before = {entry.request_id: entry for entry in self.scheduler._books.live()}
        plan = self.core.step(float(now))
        self.plans.append(plan)
        check_progress(plan, before)
        check_order(plan, before, self.scheduler)
        return plan

    def play(self) -> None:
        """Submit everything, then go on until nothing is left, within the bound."""
        now = 0
        for number, life in enumerate(self.script):
            for _ in range(life.delay):
                self.step(now)
                now += 1
            self.submit(now, number, life)
        bound = now + 2 * self.rows + len(self.submitted)
        while not self.scheduler.is_idle:
            assert now <= bound, "more steps than the bound allows"
            self.step(now)
            now += 1
        self.step(now)


def check_progress(plan: StepPlan, before: dict[str, Entry]) -> None:
    """Each step with a live request computes, ends or brings something back."""
    if before:
        assert plan.rows or plan.ended or plan.swap_ins


def check_order(plan: StepPlan, before: dict[str, Entry], scheduler: Scheduler) -> None:
    """Nobody is overtaken for a resource by a later request of the same or a lower priority."""
    waits = dict(plan.waits)
    after = {name: scheduler.entry(name) for name in before if scheduler.entry(name) is not None}
    ran_before = any(entry.is_running for name, entry in before.items() if name in after)
    for name, reason in waits.items():
        entry = before[name]
        if reason not in LACKING:
            continue
        if entry.phase in {Phase.QUEUED, Phase.SWAPPED} and after[name].phase is entry.phase:
            for start in plan.admissions:
                other = before[start.request_id]
                assert other.rank < entry.rank
                if entry.phase is Phase.SWAPPED:
                    assert other.request.priority > entry.request.priority
            for back in plan.swap_ins:
                other = before[back.request_id]
                assert other.request.priority >= entry.request.priority or not ran_before
        if entry.phase is Phase.DECODE:
            assert all(before[one.request_id].rank < entry.rank for one in (*plan.admissions, *plan.swap_ins))
            assert all(before[new.request_id].rank < entry.rank for new in plan.allocations)
    for out in plan.preemptions:
        victim = before[out.request_id]
        assert before[out.for_request].rank < victim.rank
        still = [entry for name, entry in after.items() if entry.is_running]
        assert all(entry.rank < victim.rank for entry in still)
    started = [entry for entry in after.values() if entry.phase in {Phase.PREFILL, Phase.DECODE, Phase.SWAPPED}]
    running = [entry for entry in started if entry.is_running and before[entry.request_id].is_running]
    if running and not plan.swap_ins:
        first = min(running, key=lambda entry: entry.rank)
        if min(started, key=lambda entry: entry.rank) is first:
            assert waits.get(first.request_id) in {None, WaitReason.ROWS}


@given(configs(), st.lists(lives, min_size=2, max_size=12), st.booleans())
@settings(max_examples=250)
def test_any_mix_of_requests_runs_to_its_end_within_the_rules(
    config: SchedulerConfig, script: list[Life], resume_everywhere: bool
) -> None:
    run = Run(config, script, resume_everywhere=resume_everywhere)
    run.play()
    assert sorted(run.core.ended) == sorted(run.submitted)
    assert run.core.sequences == {}
    assert run.scheduler.holdings == {}
    assert run.scheduler.counts.host_bytes == 0
    assert len(run.core.free) + len(run.core.index) == config.num_blocks
    assert run.core.most_host_bytes <= config.host_bytes


@given(configs(), st.lists(lives, min_size=1, max_size=5))
@settings(max_examples=30)
def test_the_same_events_give_the_same_plans(config: SchedulerConfig, script: list[Life]) -> None:
    first, second = (Run(config, script, resume_everywhere=True) for _ in range(2))
    first.play()
    second.play()
    assert first.plans == second.plans
