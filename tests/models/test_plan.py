from headrace.models.deepseek_v41.config import from_json
from headrace.models.deepseek_v41.plan import build_plan
from tests.factories import tiny_config
from tests.release import DOCUMENT

RELEASE = build_plan(from_json(DOCUMENT))


def test_the_released_layers_play_the_published_parts() -> None:
    assert [plan.id for plan in RELEASE] == list(range(43))
    by_role = {role: [plan.id for plan in RELEASE if plan.role == role] for role in ("window", "full", "reindex")}
    assert by_role == {"window": [0, 1, 40, 41, 42], "full": [2, 8, 14, 20], "reindex": [24, 28, 32, 36]}
    assert [plan.id for plan in RELEASE if plan.has_ngram] == [1, 14]
    assert [plan.id for plan in RELEASE if plan.has_candidates] == [20]
    assert {plan.half for plan in RELEASE[:20]} == {"encoder"}
    assert {plan.half for plan in RELEASE[20:40]} == {"decoder"}
    assert {plan.half for plan in RELEASE[40:]} == {None}
    assert [plan.id for plan in RELEASE if plan.is_draft] == [40, 41, 42]


def test_every_layer_names_its_sources() -> None:
    assert [plan.kv_source for plan in RELEASE] == ([None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20 + [None] * 3)
    assert [plan.index_source for plan in RELEASE] == (
        [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4 + [None] * 3
    )
    assert [plan.ratio for plan in RELEASE] == [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]


def test_parts_that_are_switched_off_leave_no_mark() -> None:
    plans = build_plan(tiny_config(draft=False, engram=False, candidate_source_layer_id=-1))
    assert len(plans) == 7
    assert not any(plan.has_ngram or plan.has_candidates or plan.is_draft for plan in plans)
