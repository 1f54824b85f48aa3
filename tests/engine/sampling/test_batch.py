"""A token depends on its own row and state alone, and a row that has no token says so."""

import math

import pytest
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import RowError, sample, sample_batch
from headrace.engine.sampling.state import SamplerState
from tests.engine.sampling.states import EOS, VOCAB, state_of

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.01, top_p=0.9),
    SamplingParams(frequency_penalty=1.0, logit_bias={5: 3}),
    SamplingParams(),
    SamplingParams(temperature=2.0, repetition_penalty=1.5, min_tokens=20),
    SamplingParams(min_tokens=3, stop_token_ids=[7]),
]


def logits_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def states_of(kinds: list[SamplingParams] = KINDS) -> list[SamplerState]:
    return [
        state_of(params, prompt=range(place, 3 * place), answer=[place, 5, 5], seed=place * 11)
        for place, params in enumerate(kinds)
    ]


def test_a_batch_gives_what_its_rows_give_alone() -> None:
    for seed in range(20):
        logits, states = logits_of(len(KINDS), seed), states_of()
        assert sample_batch(logits, states) == [sample(row, state) for row, state in zip(logits, states, strict=True)]


def test_a_token_does_not_depend_on_the_order_or_size_of_the_batch() -> None:
    logits, states = logits_of(len(KINDS)), states_of()
    whole = sample_batch(logits, states)
    for kept in ([6, 5, 4, 3, 2, 1, 0], [1, 5], [0, 4], [2, 2, 2]):
        assert sample_batch(logits[kept], [states[i] for i in kept]) == [whole[i] for i in kept]


def test_rows_of_a_wider_matrix_give_the_same_tokens() -> None:
    wide = torch.cat([logits_of(len(KINDS)), torch.full((len(KINDS), 112), 50.0)], dim=1)
    assert sample_batch(wide[:, :VOCAB], states_of()) == sample_batch(logits_of(len(KINDS)), states_of())


def test_sampling_changes_neither_logits_nor_states() -> None:
    logits, states = logits_of(len(KINDS)), states_of()
    first = sample_batch(logits, states)
    assert sample_batch(logits, states) == first
    assert logits.equal(logits_of(len(KINDS)))


def test_a_batch_of_none_has_no_tokens() -> None:
    assert sample_batch(torch.empty(0, VOCAB), []) == []


def test_seed_and_position_alone_decide_what_is_drawn() -> None:
    """What came before, and how often the state was asked, does not matter."""
    params, logits = SamplingParams(temperature=1.5), logits_of(12)
    long_answer = state_of(params, prompt=[1, 2], answer=[9, 9, 9], seed=4)
    long_prompt = state_of(params, prompt=[8, 7, 6, 5], answer=[3], seed=4)
    assert long_answer.position == long_prompt.position == 5
    assert [sample(row, long_answer) for row in logits] == [sample(row, long_prompt) for row in logits]
    tokens = {sample(logits[0], state_of(params, seed=seed, position=5)) for seed in range(30)}
    assert len(tokens) > 10


# -------------------------------------------------------------------------------------------------------------- copies


def test_copies_of_a_state_count_apart() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    first = state_of(params, prompt=[1], answer=[2])
    second = first.copy()
    second.accept(3)
    second.accept(2)
    for state, position, counts in ((first, 2, {2: 1.0}), (second, 4, {2: 2.0, 3: 1.0})):
        assert state.position == position
        assert dict(zip(state.generated.ids.tolist(), state.generated.counts.tolist(), strict=True)) == counts
        assert set(state.seen.ids.tolist()) == {1, *counts}


def test_a_fork_is_a_copy_with_another_seed() -> None:
    params, logits = SamplingParams(temperature=2.0, presence_penalty=0.5), logits_of(1)[0]
    parent = state_of(params, prompt=[1, 2], answer=[4])
    children = [parent.fork(index) for index in range(20)]
    assert sample(logits, children[0]) == sample(logits, parent)
    assert len({child.seed for child in children}) == 20
    assert len({sample(logits, child) for child in children}) > 5
    assert {child.position for child in children} == {3}
    assert parent.fork(3).seed == children[3].seed


# ----------------------------------------------------------------------------------------------------------- the end


def test_accepting_tells_what_ends_an_answer() -> None:
    assert state_of().accept(EOS)
    assert not state_of().accept(1)
    assert not state_of(SamplingParams(ignore_eos=True)).accept(EOS)
    stops = SamplingParams(stop_token_ids=[7, 9], ignore_eos=True)
    assert [state_of(stops).accept(token_id) for token_id in (7, 8, 9)] == [True, False, True]


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", range(len(KINDS)))
def test_a_row_with_a_number_that_is_none_is_named_and_gives_no_token(row: int, bad: float) -> None:
    logits = logits_of(len(KINDS))
    logits[row, 17] = bad
    with pytest.raises(RowError, match=f"row {row} ") as failure:
        sample_batch(logits, states_of())
    assert failure.value.row == row
    assert isinstance(failure.value, InternalError)


def test_a_row_of_impossible_tokens_gives_none() -> None:
    logits = logits_of(2)
    logits[1] = -math.inf
    with pytest.raises(RowError, match="the largest logit of row 1 is -inf"):
        sample_batch(logits, [state_of(), state_of()])


def test_a_row_left_without_a_token_by_its_masks_gives_none() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, EOS] = 0
    with pytest.raises(RowError, match="row 1 has no next token"):
        sample_batch(logits, [state_of(), state_of(SamplingParams(min_tokens=1))])


@pytest.mark.parametrize("logits", [torch.zeros(1, VOCAB, dtype=torch.bfloat16), torch.zeros(2, VOCAB)])
def test_logits_of_another_kind_or_number_are_refused(logits: Tensor) -> None:
    with pytest.raises(InternalError, match="float32 and one row per state"):
        sample_batch(logits, [state_of()])
