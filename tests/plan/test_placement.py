"""What goes where, for any budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.facts import DRAFT, EXPERTS, TABLES, Facts
from headrace.plan.families import released
from headrace.plan.placement import place

V41 = released("deepseek-v4.1-flash")
QWEN = released("qwen3.8-flash-next")
GB = 10**9
CORE = 9_850_000_000  # a little more than the weights that every token of V4.1 reads


@settings(deadline=None)
@given(
    facts=st.sampled_from([V41, QWEN]), context=st.integers(1, 1 << 20), sessions=st.integers(1, 500),
    memory=st.integers(1, 900 * GB), disk=st.integers(1, 900 * GB),
)  # fmt: skip
def test_no_budget_is_exceeded_and_nothing_is_lost(
    facts: Facts, context: int, sessions: int, memory: int, disk: int
) -> None:
    placed = place(facts, context, sessions, memory, disk)
    assert placed.memory_used <= memory
    assert all(0 <= part.in_memory <= part.num_bytes for part in placed.parts)
    assert all(part.on_disk + part.in_memory <= part.num_bytes for part in placed.parts)
    assert sum(part.num_bytes for part in placed.parts) == placed.memory_needed
    assert 0 <= placed.running <= sessions
    assert placed.fits == (placed.running > 0 and placed.disk_needed <= disk)
    assert placed.disk_needed == facts.weight_bytes + (sessions - placed.running) * facts.kv_bytes(context)


@settings(deadline=None)
@given(context=st.integers(1, 1 << 20), sessions=st.integers(1, 500), memory=st.integers(1, 900 * GB))
def test_more_memory_never_runs_fewer_sequences(context: int, sessions: int, memory: int) -> None:
    less, more = (place(V41, context, sessions, size, None) for size in (memory, memory + 10 * GB))
    assert less.running <= more.running
    assert less.memory_used <= more.memory_used


def test_without_budgets_everything_is_in_memory_at_once() -> None:
    placed = place(V41, 1 << 20, 32, None, None)
    assert placed.fits
    assert placed.remarks == ()
    assert placed.memory_used == placed.memory_needed


def test_memory_too_small_for_the_weights_of_every_token_is_said_with_the_least_that_would_do() -> None:
    placed = place(V41, 131_072, 1, 5 * GB, None)
    (problem,) = placed.problems
    assert not placed.fits
    assert "memory of 5.00 GB" in problem
    least = CORE // 10**7 / 100  # in GB with two decimals
    assert f"({least:.2f} GB)" in problem
    assert "is the least" in problem


def test_the_least_that_is_said_is_enough() -> None:
    kv, fixed = V41.kv_bytes(131_072), V41.window_bytes + V41.state_bytes
    core = V41.weight_bytes - V41.num_bytes(EXPERTS, TABLES, DRAFT, "vision tower")
    assert place(V41, 131_072, 1, core + kv + fixed, None).fits
    assert not place(V41, 131_072, 1, core + kv + fixed - 1, None).fits


def test_experts_spill_before_sequences_rest() -> None:
    placed = place(V41, 1 << 20, 32, 100 * GB, None)
    assert placed.running == 32
    (experts,) = (part for part in placed.parts if part.name == EXPERTS)
    assert 0 < experts.in_memory < experts.num_bytes
    assert any("routed experts" in remark for remark in placed.remarks)


def test_sequences_rest_on_disk_when_memory_ends() -> None:
    placed = place(V41, 1 << 20, 32, 20 * GB, None)
    assert 0 < placed.running < 32
    resting = (32 - placed.running) * V41.kv_bytes(1 << 20)
    assert placed.disk_needed == V41.weight_bytes + resting
    assert any(f"{placed.running} of 32 sequences" in remark for remark in placed.remarks)


@pytest.mark.parametrize(("disk", "fits"), [(510, False), (511, True)])
def test_the_disk_holds_the_checkpoint_whole(disk: int, fits: bool) -> None:
    placed = place(V41, 4096, 1, None, disk * GB)
    assert placed.fits == fits
    assert any("is the least" in problem for problem in placed.problems) != fits
