"""A request without a model: ids in, text, stops and reasons out."""

import numpy as np
import pytest
import torch

from headrace.cache.sequence_state import SequenceState, StateShape
from headrace.engine.request import Result, Running
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.text.tokenizer import Tokenizer
from tests.factories import tiny_checkpoint

EOS, PAD = 257, 258
PROMPT = np.array([256, 5, 6], dtype=np.int64)
SHAPE = StateShape(
    head_dim=32,
    index_head_dim=32,
    window=4,
    num_layers=2,
    num_draft_layers=0,
    decoder_start=1,
    source_ratios={1: 1},
    lookback=0,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a random checkpoint; ids below 256 are bytes."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(folder / "tokenizer.json")


def start(tokenizer: Tokenizer | None, limit: int = 512, **params: object) -> Running:
    state = SequenceState(SHAPE, torch.device("cpu"))
    sampler = SamplerState(SamplingParams(**params), PROMPT, seed=12, eos_token_id=EOS, vocab_size=320)
    return Running.start(PROMPT, sampler, state, tokenizer, limit=limit)


def feed(request: Running, ids: list[int]) -> tuple[list[str], Result]:
    """Give a request tokens, all of which it must take, the last one as its end."""
    pieces = []
    for token_id in ids:
        assert request.finish_reason is None
        pieces.append(request.accept(token_id, None))
    assert request.finish_reason is not None
    return pieces, request.result()


def test_text_comes_token_by_token_and_adds_up(tokenizer: Tokenizer) -> None:
    pieces, result = feed(start(tokenizer, max_tokens=4), [*b"abc", 302])
    assert pieces == ["a", "b", "c", "he"]
    assert (result.text, result.token_ids, result.finish_reason) == ("abche", [97, 98, 99, 302], "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (3, 4, 0)


def test_the_end_token_ends_without_text(tokenizer: Tokenizer) -> None:
    pieces, result = feed(start(tokenizer), [*b"ab", EOS])
    assert pieces == ["a", "b", ""]
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert result.token_ids == [97, 98, EOS]


def test_the_end_token_can_be_ignored(tokenizer: Tokenizer) -> None:
    _, result = feed(start(tokenizer, ignore_eos=True, max_tokens=3), [97, EOS, 98])
    assert (result.text, result.finish_reason) == ("ab", "length")


def test_the_end_token_as_the_last_allowed_one_is_a_stop(tokenizer: Tokenizer) -> None:
    assert feed(start(tokenizer, max_tokens=2), [97, EOS])[1].finish_reason == "stop"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert feed(start(tokenizer, max_tokens=3), [97, PAD, 98])[1].text == "ab"


def test_half_a_character_is_held_back_and_shown_at_the_end(tokenizer: Tokenizer) -> None:
    pieces, result = feed(start(tokenizer, max_tokens=4), list("aé€".encode())[:4])
    assert pieces == ["a", "", "é", "\ufffd"]
    assert result.text == "aé\ufffd"
    pieces, _ = feed(start(tokenizer), [195, EOS])
    assert pieces == ["", "\ufffd"]


@pytest.mark.parametrize("stop", [("nd",), ("zz", "en"), ("d",)])
def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    ids = [*b"the ", 278, *b"d"]  # 278 is "en"
    taken = ids[: -1 if "en" in stop else None]
    pieces, result = feed(start(tokenizer, stop=stop), taken)
    assert result.finish_reason == "stop"
    assert result.text == "".join(pieces) == "the end".partition(stop[-1])[0]
    assert result.token_ids == taken


def test_what_might_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    pieces, result = feed(start(tokenizer, stop=("END",), max_tokens=6), list(b"aENbEN"))
    assert pieces == ["a", "", "", "ENb", "", "EN"]
    assert (result.text, result.finish_reason) == ("aENbEN", "length")
    pieces, result = feed(start(tokenizer, stop=("END",)), [*b"aEN", EOS])
    assert pieces == ["a", "", "", "EN"]
    assert result.finish_reason == "stop"


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    assert feed(start(tokenizer, stop=("b",), max_tokens=2), list(b"ab"))[1].finish_reason == "stop"


def test_the_context_ends_an_answer(tokenizer: Tokenizer) -> None:
    _, result = feed(start(tokenizer, limit=5), [97, 98])
    assert (result.finish_reason, result.usage.completion_tokens) == ("length", 2)
    assert feed(start(tokenizer, limit=3), [97])[1].finish_reason == "length"


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    pieces, result = feed(start(None, max_tokens=2), [300, 5])
    assert pieces == ["", ""]
    assert (result.text, result.token_ids) == ("", [300, 5])


def test_log_probabilities_are_reported_only_if_asked_for(tokenizer: Tokenizer) -> None:
    request = start(tokenizer, max_tokens=2)
    request.accept(97, -0.5)
    request.accept(98, -1.5)
    assert request.result().logprobs == [-0.5, -1.5]
    assert feed(start(tokenizer, max_tokens=1, logprobs=False), [97])[1].logprobs is None


def test_the_seed_is_reported() -> None:
    assert feed(start(None, max_tokens=1), [9])[1].seed == 12


@pytest.mark.parametrize("token_id", [302, PAD])  # 302 is "he"
def test_a_stop_id_ends_without_text(tokenizer: Tokenizer, token_id: int) -> None:
    pieces, result = feed(start(tokenizer, stop_token_ids=[302, PAD]), [*b"ab", token_id])
    assert pieces == ["a", "b", ""]
    assert (result.text, result.finish_reason, result.token_ids) == ("ab", "stop", [97, 98, token_id])


def test_a_stop_id_ends_where_the_end_token_is_ignored(tokenizer: Tokenizer) -> None:
    _, result = feed(start(tokenizer, stop_token_ids=[302], ignore_eos=True), [97, EOS, 302])
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_a_stop_id_shows_half_a_character_that_was_held_back(tokenizer: Tokenizer) -> None:
    pieces, _ = feed(start(tokenizer, stop_token_ids=[302]), [195, 302])
    assert pieces == ["", "\ufffd"]


def test_text_before_the_least_number_of_tokens_ends_nothing(tokenizer: Tokenizer) -> None:
    """Neither a whole stop string nor its beginning."""
    _, result = feed(start(tokenizer, stop=("ab",), min_tokens=4), list(b"abxab"))
    assert (result.text, result.finish_reason) == ("abx", "stop")
    _, result = feed(start(tokenizer, stop=("ab",), min_tokens=2, max_tokens=3), list(b"xab"))
    assert (result.text, result.finish_reason) == ("x", "stop")
    _, result = feed(start(tokenizer, stop=("ab",), min_tokens=3, max_tokens=3), list(b"xab"))
    assert (result.text, result.finish_reason) == ("xab", "length")


def test_positions_count_prompt_and_answer() -> None:
    request = start(None)
    assert request.position == 3
    request.accept(9, None)
    assert request.position == 4
