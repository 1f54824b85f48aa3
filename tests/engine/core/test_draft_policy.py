"""Costs decide whether a size of batch begins with drafting and how much is verified; what happened is reported."""

from pathlib import Path

import pytest

from headrace.engine.core.draft_policy import DraftPolicy
from headrace.engine.drafting.cost_table import CostTable, read_cost_table
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.watch import CalibrationWatch

TABLES = Path(__file__).parents[1] / "drafting" / "tables"
SURE = Proposal("draft", (1, 2, 3, 4, 5), confidences=(1.4, 0.6, 0.8, 1.0, 1.2))  # about 0.80, 0.52, 0.36, 0.26, 0.20


def recorded(kernels: str) -> CostTable:
    """Seconds of headrace-nano on one thread of a two-core machine, medians of seven."""
    return read_cost_table(TABLES / f"headrace-nano-{kernels}.json")


def drafted(policy: DraftPolicy, kept: int, steps: int, *, batch: int = 1, seconds: float | None = None) -> list[bool]:
    """Return which of so many steps drafted; they take what the policy expects, or so many seconds."""
    names, found = [str(place) for place in range(batch)], []
    for step in range(steps):
        found.append(policy.wants(dict.fromkeys(names, steps - step)))
        took = seconds or (policy.price(batch) if found[-1] else 1.0)
        policy.note_step(dict.fromkeys(names, 1 + kept * found[-1]), is_drafted=found[-1], seconds=took)
    return found


def lengths(policy: DraftPolicy, batch: int) -> list[int]:
    return policy.lengths([policy.judge(SURE)] * batch)


def test_where_drafting_pays_by_a_recorded_table_it_is_chosen() -> None:
    policy = DraftPolicy(5, table=recorded("torch"))
    assert policy.is_promising(1)
    assert policy.price(1) < 1.8
    assert drafted(policy, kept=3, steps=160)[-20:].count(True) >= 18
    assert lengths(policy, 1) == [5]
    assert min(lengths(policy, 4)) >= 1


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_where_drafting_costs_more_than_it_brings_it_is_not(batch: int) -> None:
    policy = DraftPolicy(5, table=recorded("native"))
    assert not policy.is_promising(batch)
    assert policy.price(batch) > 5
    assert not any(drafted(policy, kept=3, steps=160, batch=batch))
    for _ in range(200):  # nor would it if every guess were kept
        policy.note_round(policy.judge(SURE), 5)
    assert not policy.is_promising(batch)


def test_a_start_without_drafts_is_probed_and_left_where_drafting_wins() -> None:
    policy = DraftPolicy(5, table=recorded("native"))
    assert drafted(policy, kept=5, steps=2000, seconds=0.01)[-20:].count(True) >= 18
    report = policy.report()[1]
    assert not report.is_paused
    assert report.probes >= 1
    assert policy.gain(1) == pytest.approx(6.0)


def test_guesses_that_hardly_ever_stay_make_drafting_unpromising() -> None:
    policy = DraftPolicy(5, table=recorded("torch"))
    for _ in range(100):
        policy.note_round(policy.judge(SURE), 0)
    assert not policy.is_promising(1)


def test_without_a_table_drafting_begins_and_all_guesses_are_verified() -> None:
    policy = DraftPolicy(5)
    assert drafted(policy, kept=3, steps=160, batch=3)[-20:].count(True) >= 18
    assert lengths(policy, 2) == [5, 5]
    assert not policy.wants({})


def test_one_that_is_not_guarded_always_drafts() -> None:
    assert all(drafted(DraftPolicy(5, is_guarded=False), kept=0, steps=50))


def test_the_status_is_the_guards_report_and_the_error_of_the_newest_guesses() -> None:
    policy = DraftPolicy(5)
    assert policy.status() == {"draft_calibration_guesses": 0}
    assert policy.gain(1) is None
    judged = policy.judge(SURE)
    policy.note_round(judged, 2)
    policy.note_round(judged.cut(1), 0)
    for is_drafted, tokens in ((True, (1, 2)), (False, (1, 0))):
        policy.note_step(dict(zip("ab", tokens, strict=True)), is_drafted=is_drafted, seconds=0.5)
    first, second, *rest = judged.chances or ()
    # 0.80 is alone in its bin and once right, once wrong; the others are one to a bin, kept, refused, refused, refused
    wanted = (abs(2 * first - 1) + abs(second - 1) + sum(rest)) / 6
    status = policy.status()
    assert status.pop("draft_calibration_error") == pytest.approx(wanted)
    assert status == {
        "draft_calibration_guesses": 6,
        "draft_batch_2_with": 6.0,
        "draft_batch_2_without": 2.0,
        "draft_batch_2_paused": 1,
        "draft_batch_2_probes": 0,
        "draft_batch_2_pauses": 0,
    }
    assert policy.gain(2) == policy.gain(3) == 3.0
    assert policy.gain(1) is None


def test_only_the_newest_guesses_count() -> None:
    watch = CalibrationWatch(window=4)
    watch.add((0.9, 0.9, 0.9, 0.9), 0)
    assert watch.error() == pytest.approx(0.9)
    watch.add((1.0, 1.0, 1.0, 1.0), 4)
    assert (len(watch), watch.error()) == (4, 0.0)


def test_a_proposal_keeps_how_many_guesses_there_were() -> None:
    judged = DraftPolicy(5).judge(SURE)
    assert (len(judged.cut(2)), judged.cut(2).num_made, judged.cut(0).num_made) == (2, 5, 5)
    assert judged.cut(2).chances == (judged.chances or ())[:2]
