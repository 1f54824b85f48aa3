"""What the x-ray of a request says against what the whole-sequence trace of the same tokens selects."""

import numpy as np
import pytest

from headrace.engine.core.events import PrefillEvent, TokenEvent
from headrace.engine.core.xray import merged_spans
from headrace.models.deepseek_v41.plan import build_plan
from tests.engine.core.serving import Client, core, params, prompt, tiny
from tests.engine.core.test_drafts import Scripted, truth


def told(engine, name: str, ids: list[int], **chosen: object) -> list[PrefillEvent | TokenEvent]:
    client = Client(engine)
    client.submit(name, ids, params(**chosen))
    events = []
    while not engine.is_idle:
        events += client.step()
    return [event for event in events if event.request_id == name]


@pytest.mark.parametrize(
    ("entries", "ratio", "spans"),
    [
        ([], 2, ()),
        ([-1, -1], 2, ()),
        ([3, -1, 1, 2, 7], 1, ((1, 4), (7, 8))),
        ([0, 2, 3], 4, ((0, 4), (8, 16))),
    ],
)
def test_neighbouring_entries_become_one_span(entries, ratio, spans) -> None:
    assert merged_spans(np.array(entries, dtype=np.int64), ratio) == spans


def test_every_token_says_what_its_row_read() -> None:
    model = tiny()
    config = model.config
    events = told(core(), "a", prompt(300), xray=True, max_tokens=5)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == 5
    sources = {plan.id: plan for plan in build_plan(config) if plan.role in {"full", "reindex"}}
    for index, event in enumerate(tokens):
        position = 300 + index - 1  # of the row whose logits gave the token
        assert event.xray is not None
        assert event.xray.request.kind == ("decode" if index else "prefill")
        assert event.xray.request.stop == position + 1
        assert set(event.xray.reads) == set(sources)
        for layer_id, reads in event.xray.reads.items():
            visible = (position + 1) // sources[layer_id].ratio
            covered = sum(stop - start for start, stop in reads.entries)
            assert covered == min(visible, config.index_topk) * sources[layer_id].ratio
            assert reads.window[1] == position + 1
            assert reads.window[1] - reads.window[0] <= config.window


def test_reads_are_those_of_the_same_rows_in_one_prefill() -> None:
    ids = prompt(200)
    first = told(core(), "a", ids, xray=True, max_tokens=4, mode="full")
    tokens = [event for event in first if isinstance(event, TokenEvent)]
    longer = [*ids, *(event.token_id for event in tokens[:3])]
    again = told(core(), "b", longer, xray=True, max_tokens=1, mode="full")
    assert again[-1].xray.reads == tokens[-1].xray.reads


def test_prefill_steps_are_told_one_by_one_with_what_the_cache_gave() -> None:
    engine = core()
    told(engine, "a", prompt(200), xray=True)
    steps = [event for event in told(engine, "b", prompt(200), xray=True) if isinstance(event, PrefillEvent)]
    assert steps[0].xray.request.cached_tokens == 200
    assert steps[-1].xray.request.replayed_rows == engine.model.config.window
    assert steps[-1].xray.request.stop == 200


def test_an_x_ray_changes_no_token_and_no_log_probability() -> None:
    seen, unseen = told(core(), "a", prompt(150), xray=True), told(core(), "a", prompt(150))
    last, plain = seen[-1].result, unseen[-1].result
    assert (last.token_ids, last.logprobs) == (plain.token_ids, plain.logprobs)
    assert all(event.xray is None for event in unseen)


def test_tokens_of_one_verify_step_say_what_their_own_rows_read() -> None:
    ids = prompt(300)
    plain = [event for event in told(core(), "a", ids, xray=True, max_tokens=9) if isinstance(event, TokenEvent)]
    drafter = Scripted(truth(ids, 9), [3, 1, 2])
    drafted = told(core(drafter=drafter), "a", ids, xray=True, max_tokens=9)
    tokens = [event for event in drafted if isinstance(event, TokenEvent)]
    assert any(event.is_draft for event in tokens)
    assert len({event.xray.step for event in tokens}) < len(tokens)
    assert [event.xray.reads for event in tokens] == [event.xray.reads for event in plain]
    for number in {event.xray.step for event in tokens}:
        step = [event for event in tokens if event.xray.step == number]
        kept = sum(event.is_draft for event in step)
        assert {event.xray.request.drafts_accepted for event in step} == {kept}
        assert kept <= step[0].xray.request.drafts_proposed
