"""How a batch becomes passes, and what the decoder runs on when a prefill is replayed."""

import numpy as np
import pytest

from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample, pack_row, stack_rows
from headrace.train.graph import Segment
from headrace.train.passes import Cut, labelled_runs, plan_passes, plan_segments
from headrace.train.recipe import Phase

WINDOW = 4


def labels_of(length: int, *runs: tuple[int, int]) -> np.ndarray:
    """Return labels that are there in the given half-open runs only."""
    labels = np.full(length, IGNORE)
    for first, stop in runs:
        labels[first:stop] = np.arange(first, stop) + 100
    return labels


def sample(length: int, *runs: tuple[int, int], kind: str = "text") -> Sample:
    """Return a document of ids 0, 1, 2, ... with labels in the given runs."""
    return Sample(token_ids=np.arange(length), labels=labels_of(length, *runs), kind=kind)


def replaying(replay: str, exact_share: float = 0.0) -> Phase:
    """Return a phase with one kind of replay."""
    return Phase(replay=replay, exact_share=exact_share)  # type: ignore[arg-type]


def test_runs_of_labels_are_found_at_both_ends() -> None:
    assert list(labelled_runs(labels_of(9, (0, 2), (4, 5), (7, 9)))) == [(0, 2), (4, 5), (7, 9)]
    assert list(labelled_runs(labels_of(3))) == []


def test_without_replay_the_decoder_sees_everything() -> None:
    assert plan_segments(labels_of(20, (9, 20)), Phase(), WINDOW, Draws(0)) is None


def test_the_last_turn_starts_a_window_before_its_first_predicted_token() -> None:
    """The first labelled row is the last of the prompt: a prompt of 13 tokens leaves rows 9 to 12 to replay."""
    cuts = plan_segments(labels_of(16, (3, 5), (12, 16)), replaying("last-turn"), WINDOW, Draws(0))
    assert cuts == (Cut(Segment(9, 16, 9), 12),)


def test_every_turn_has_a_segment_of_its_own() -> None:
    cuts = plan_segments(labels_of(20, (1, 3), (9, 12), (17, 20)), replaying("every-turn"), WINDOW, Draws(0))
    assert cuts == (Cut(Segment(0, 3, 0), 1), Cut(Segment(6, 12, 6), 9), Cut(Segment(14, 20, 14), 17))


def test_text_is_cut_into_turns_at_random_and_every_label_is_judged_once() -> None:
    labels = labels_of(200, (0, 199))
    for seed in range(20):
        cuts = plan_segments(labels, replaying("every-turn"), WINDOW, Draws(seed))
        assert cuts is not None
        judged = [row for cut in cuts for row in range(cut.judged_from, cut.segment.high)]
        assert judged == list(range(199))
        assert all(cut.judged_from - cut.segment.low in {cut.judged_from, WINDOW - 1} for cut in cuts)
        assert len(cuts) > 199 // (4 * WINDOW) - 1


def test_text_loses_the_labels_before_the_only_cut() -> None:
    cuts = plan_segments(labels_of(50, (0, 50)), replaying("last-turn"), WINDOW, Draws(3))
    assert cuts is not None
    (cut,) = cuts
    assert cut.segment.high == 50
    assert cut.segment.low == max(0, cut.judged_from + 1 - WINDOW) == cut.segment.floor


def test_some_documents_stay_whole() -> None:
    labels = labels_of(30, (20, 30))
    whole = [plan_segments(labels, replaying("last-turn", 0.25), WINDOW, Draws(seed)) is None for seed in range(400)]
    assert 0.18 < sum(whole) / len(whole) < 0.32
    assert plan_segments(labels_of(30), replaying("every-turn"), WINDOW, Draws(0)) is None, "nothing is asked"


def test_passes_hold_whole_rows_and_leave_padding_out() -> None:
    batch = stack_rows(
        [
            pack_row([sample(5, (0, 4)), sample(6, (3, 6), kind="pairs")], 12, 0),
            pack_row([sample(12, (0, 12))], 12, 0),
            pack_row([sample(3, (1, 3))], 12, 0),
        ]
    )
    plan = plan_passes(batch, Phase(), WINDOW, 24, Draws(0))
    assert [len(one.documents) for one in plan.passes] == [3, 1]
    assert [len(one.labels) for one in plan.passes] == [23, 3]
    assert (plan.num_labels, plan.num_documents, plan.num_tokens) == (4 + 3 + 12 + 2, 4, 26)
    assert plan.kind_names == ("pairs", "text")
    assert plan.passes[0].kinds.tolist() == [1] * 5 + [0] * 6 + [1] * 12
    assert plan.weight == plan.num_labels
    heavy = plan_passes(batch, Phase(), WINDOW, 24, Draws(0), {"pairs": 2.5})
    assert heavy.passes[0].weights.tolist() == [1.0] * 5 + [2.5] * 6 + [1.0] * 12
    assert heavy.weight == 4 + 2.5 * 3 + 12 + 2


@pytest.mark.parametrize("size", [1, 12, 1000])
def test_a_pass_holds_at_least_one_row(size: int) -> None:
    batch = stack_rows([pack_row([sample(12, (0, 12))], 12, 0) for _ in range(3)])
    plan = plan_passes(batch, Phase(), WINDOW, size, Draws(0))
    assert len(plan.passes) == (1 if size == 1000 else 3)


def test_labels_of_a_replayed_pass_lie_beside_the_rows_that_the_decoder_runs() -> None:
    batch = stack_rows([pack_row([sample(16, (3, 5), (12, 16))], 16, 0)])
    (one,) = plan_passes(batch, replaying("every-turn"), WINDOW, 16, Draws(0)).passes
    assert one.documents[0].segments == (Segment(0, 5, 0), Segment(9, 16, 9))
    ignored = [IGNORE] * 3
    assert one.labels.tolist() == [*ignored, 103, 104, *ignored, 112, 113, 114, 115]
