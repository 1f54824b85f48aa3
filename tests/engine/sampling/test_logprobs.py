from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.sampling.logprobs import log_probability, prompt_logprobs, target_logprobs, token_logprob

ROUNDING = 1e-5  # float32 against float64


def logits_of(rows: int = 5, vocab: int = 37) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3


def exact(logits: Tensor) -> np.ndarray:
    x = logits.numpy().astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_log_probabilities_are_those_of_the_softmax() -> None:
    row = logits_of()[2]
    for token_id, wanted in enumerate(exact(row)):
        found = token_logprob(row, token_id)
        assert (found.token_id, found.top) == (token_id, ())
        assert found.logprob == log_probability(row, token_id) == pytest.approx(wanted, abs=ROUNDING)


def test_the_rank_counts_more_probable_tokens_and_equal_ones_of_lower_id() -> None:
    row = torch.tensor([1.0, 3.0, 1.0, 2.0, 3.0])
    assert [token_logprob(row, token_id).rank for token_id in range(5)] == [4, 1, 5, 3, 2]


def test_alternatives_are_the_most_probable_ones_best_first() -> None:
    row = torch.tensor([1.0, 3.0, 1.0, 2.0, 3.0])
    found = token_logprob(row, 2, 4)
    assert [token_id for token_id, _ in found.top] == [1, 4, 3, 0]
    for token_id, logprob in found.top:
        assert logprob == log_probability(row, token_id)
    assert len(token_logprob(row, 2, 20).top) == 5


def test_prompt_tokens_are_judged_by_the_row_before_them_and_the_first_by_none() -> None:
    logits, ids = logits_of(), [3, 8, 8, 0, 30]
    found = prompt_logprobs(logits, ids, 2)
    assert found[0] is None
    for place in range(1, 5):
        assert found[place] == token_logprob(logits[place - 1], ids[place], 2)


def test_a_prompt_in_chunks_gives_the_same_as_in_one() -> None:
    logits, ids = logits_of(9, 500), np.array([3, 8, 8, 0, 30, 499, 2, 2, 7])
    parts = [target_logprobs(logits[low:high], ids[low + 1 : high + 1], 3) for low, high in ((0, 1), (1, 6), (6, 8))]
    assert [None, *chain.from_iterable(parts)] == prompt_logprobs(logits, ids, 3)


def test_an_empty_prompt_part_has_no_entries() -> None:
    assert target_logprobs(logits_of(0), []) == []


def test_rows_and_tokens_must_be_as_many() -> None:
    with pytest.raises(InternalError, match="5 rows of logits were given for a prompt of 4 tokens"):
        prompt_logprobs(logits_of(), [1, 2, 3, 4])
    with pytest.raises(InternalError, match="5 rows of logits were given for 6 tokens"):
        target_logprobs(logits_of(), [1, 2, 3, 4, 5, 6])
