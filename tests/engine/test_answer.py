"""An answer without a model: ids in, text, stops and reasons out."""

import numpy as np
import pytest
import torch

from headrace.engine.answer import Answer
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.text.tokenizer import Tokenizer
from tests.factories import tiny_checkpoint

EOS, PAD = 257, 258
PROMPT = np.array([256, 5, 6], dtype=np.int64)
VOCAB = 320
LOGITS = torch.linspace(0.0, 1.0, VOCAB)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a random checkpoint; ids below 256 are bytes."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(folder / "tokenizer.json")


def start(tokenizer: Tokenizer | None, limit: int = 512, **params: object) -> Answer:
    sampler = SamplerState(SamplingParams(**params), PROMPT, seed=12, eos_token_id=EOS, vocab_size=VOCAB)
    return Answer(PROMPT, sampler, tokenizer, limit)


def feed(answer: Answer, ids: list[int]) -> tuple[list[str], Answer]:
    """Give an answer tokens, all of which it must take, the last one as its end."""
    pieces = []
    for token_id in ids:
        assert answer.finish_reason is None
        pieces.append(answer.take(token_id, LOGITS))
    assert answer.finish_reason is not None
    return pieces, answer


def test_text_comes_token_by_token_and_adds_up(tokenizer: Tokenizer) -> None:
    pieces, result = feed(start(tokenizer, max_tokens=4), [*b"abc", 302])
    assert pieces == ["a", "b", "c", "he"]
    assert (result.text, result.token_ids, result.finish_reason) == ("abche", [97, 98, 99, 302], "length")


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
    assert (result.finish_reason, len(result.token_ids)) == ("length", 2)
    assert feed(start(tokenizer, limit=3), [97])[1].finish_reason == "length"


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    pieces, result = feed(start(None, max_tokens=2), [300, 5])
    assert pieces == ["", ""]
    assert (result.text, result.token_ids) == ("", [300, 5])


def test_log_probabilities_are_noted_only_if_asked_for(tokenizer: Tokenizer) -> None:
    expected = torch.log_softmax(LOGITS, -1)
    answer = start(tokenizer, max_tokens=2)
    answer.take(97, LOGITS)
    answer.take(98, LOGITS.flip(0))
    assert answer.logprobs == [float(expected[97]), float(expected[VOCAB - 1 - 98])]
    assert answer.token_logprobs == []
    assert feed(start(tokenizer, max_tokens=1, logprobs=False), [97])[1].logprobs == []


def test_alternatives_are_noted_beside_their_token(tokenizer: Tokenizer) -> None:
    answer = feed(start(tokenizer, max_tokens=1, top_logprobs=2), [317])[1]
    (noted,) = answer.token_logprobs
    assert (noted.token_id, noted.rank, [token_id for token_id, _ in noted.top]) == (317, 3, [319, 318])
    assert answer.logprobs == [noted.logprob]


def test_what_ended_an_answer_is_named(tokenizer: Tokenizer) -> None:
    assert feed(start(tokenizer, stop=("zz", "b")), list(b"ab"))[1].stop == "b"
    assert feed(start(tokenizer, stop_token_ids=[302]), [97, 302])[1].stop == 302
    assert feed(start(tokenizer), [97, EOS])[1].stop is None
    assert feed(start(tokenizer, max_tokens=1), [97])[1].stop is None


def test_an_end_from_outside_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    answer = start(tokenizer, stop=("bc",))
    pieces = [answer.take(token_id, LOGITS) for token_id in [*b"ab", 195]]
    assert pieces == ["a", "", ""]
    assert answer.end("cancelled") == "b\ufffd"
    assert (answer.text, answer.finish_reason) == ("ab\ufffd", "cancelled")
    assert start(tokenizer).end("deadline") == ""


def test_a_further_answer_starts_empty_with_a_seed_of_its_own(tokenizer: Tokenizer) -> None:
    first = start(tokenizer, max_tokens=4, n=3)
    first.take(97, LOGITS)
    second = start(tokenizer, max_tokens=4, n=3).fork(1)
    assert (second.token_ids, second.text, second.position) == ([], "", 3)
    assert second.sampler.seed not in {first.sampler.seed, start(tokenizer, n=3).fork(2).sampler.seed}


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
    request.take(9, LOGITS)
    assert request.position == 4
