"""Conversations that come back answer as well as those that are read anew: few and short ones here."""

import pytest
import torch

from benchmarks.return_success import POINTS, SITUATIONS, conversations, figures_of, measure
from headrace.core.shipped import shipped_model


@pytest.mark.parametrize(
    ("count", "questions", "old"),
    [pytest.param(1, 3, 600, id="short"), pytest.param(20, 16, 7000, id="promised", marks=pytest.mark.full)],
)
def test_a_conversation_that_comes_back_answers_as_well_as_one_that_is_read_anew(
    count: int, questions: int, old: int
) -> None:
    torch.set_num_threads(1)
    said = measure(shipped_model(), None, conversations(shipped_model(), count, old, 100, questions))
    assert all(len(said.right[name]) == count * questions for name in ("cold", *SITUATIONS))
    assert said.share("cold") >= 90
    assert all(abs(said.share(name) - said.share("cold")) <= POINTS for name in SITUATIONS)
    # exact answers are those of a prompt that is read anew, one by one
    assert all(said.changed(name) == 0 for name in SITUATIONS if "replay" not in name)
    assert all(figure.passed is not False for figure in figures_of(said))
