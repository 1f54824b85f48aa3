"""`LLM`: answers, batches, refusals and streams, on a random model whose ids below 256 are bytes."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.core.errors import CapacityError, CheckpointError, UserError
from headrace.engine.request import Result
from headrace.models.deepseek_v41.batch import Mode, Span
from tests import damage
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER

MODES: tuple[Mode, ...] = ("full", "replay")
LENGTHS = (5, 17, 8, 33)
BOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("engine"), tiny_config(vision=False, max_position_embeddings=64))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1) as one:
        yield one


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, length).tolist() for length in LENGTHS]


def answer(llm: LLM, prompt: str | list[int], **params: object) -> Result:
    (result,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 6, "seed": 1, **params}))
    return result


# -------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("mode", MODES)
def test_greedy_answers_are_those_of_the_model_step_by_step(folder: Path, mode: Mode) -> None:
    llm, ids = LLM(folder, threads=1, mode=mode, chunk=4), prompts()[3]
    result = answer(llm, ids, max_tokens=8)
    model, window = llm.model, llm.model.config.window
    state, tokens, logprobs = model.new_state(), [], []
    rows = len(ids) if mode == "full" else window
    span = Span(state, np.array(ids), rows, is_replay=mode == "replay")
    for _ in range(8):
        logits = model.forward([span]).logits[-1]
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1).max()))
        span = Span(state, np.array(tokens[-1:]), 1)
    assert (result.token_ids, result.logprobs) == (tokens, logprobs)
    assert result.finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (33, 8)


def test_full_mode_answers_are_those_of_reading_everything_anew_each_time(folder: Path) -> None:
    llm, ids = LLM(folder, threads=1, mode="full"), prompts()[1]
    result = answer(llm, ids, max_tokens=5)
    for token_id, logprob in zip(result.token_ids, result.logprobs or [], strict=True):
        logits = llm.model.forward([Span(llm.model.new_state(), np.array(ids), len(ids))]).logits[-1]
        assert (token_id, logprob) == (int(logits.argmax()), float(torch.log_softmax(logits, -1).max()))
        ids.append(token_id)


def test_modes_differ_on_prompts_longer_than_the_window_only(folder: Path) -> None:
    full, replay = (LLM(folder, threads=1, mode=mode) for mode in MODES)
    short, long = prompts()[0], prompts()[3]
    assert answer(full, short).logprobs == answer(replay, short).logprobs
    assert answer(full, long).logprobs != answer(replay, long).logprobs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_the_bits_of_solo_runs(folder: Path, mode: Mode, temperature: float) -> None:
    llm = LLM(folder, threads=1, mode=mode)
    params = [
        SamplingParams(max_tokens=count, temperature=temperature, seed=count, ignore_eos=True)
        for count in (9, 3, 12, 6)  # they end at different steps
    ]
    together = llm.generate(prompts(), params)
    solo = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts(), params, strict=True)]
    assert together == solo
    assert [len(result.token_ids) for result in together] == [9, 3, 12, 6]


@pytest.mark.parametrize("chunk", [1, 3, 8, 16])
def test_the_chunk_size_changes_no_answer(folder: Path, llm: LLM, chunk: int) -> None:
    assert answer(LLM(folder, threads=1, chunk=chunk), prompts()[3]) == answer(llm, prompts()[3])


def test_answers_do_not_depend_on_earlier_ones(llm: LLM) -> None:
    first = answer(llm, prompts()[2])
    answer(llm, prompts()[3])
    assert answer(llm, prompts()[2]) == first


def test_log_probabilities_are_of_the_model_and_left_out_on_request(llm: LLM) -> None:
    cold, hot = answer(llm, prompts()[0], max_tokens=1), answer(llm, prompts()[0], max_tokens=1, temperature=5.0)
    logits = llm.model.forward([Span(llm.model.new_state(), np.array(prompts()[0]), 5)]).logits[-1]
    expected = torch.log_softmax(logits, -1)
    for result in (cold, hot):
        assert result.logprobs == [float(expected[result.token_ids[0]])]
    assert answer(llm, prompts()[0], logprobs=False).logprobs is None


def test_a_seed_repeats_an_answer_and_a_missing_one_is_drawn_and_reported(llm: LLM) -> None:
    hot = {"temperature": 1.0, "max_tokens": 12}
    first = answer(llm, prompts()[0], **hot, seed=None)
    assert answer(llm, prompts()[0], **hot, seed=first.seed) == first
    answers = {tuple(answer(llm, prompts()[0], **hot, seed=seed).token_ids) for seed in range(5)}
    assert len(answers) == 5


def test_sampled_tokens_follow_the_probabilities_of_the_model(llm: LLM) -> None:
    """The three most probable first tokens come as often as they should (binomial, four standard deviations)."""
    count = 120
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in range(count)]
    found = [result.token_ids[0] for result in llm.generate([prompts()[0]] * count, params)]
    logits = llm.model.forward([Span(llm.model.new_state(), np.array(prompts()[0]), 5)]).logits[-1]
    probabilities = torch.softmax(logits, -1)
    for token_id in probabilities.topk(3).indices.tolist():
        p = float(probabilities[token_id])
        assert abs(found.count(token_id) - count * p) < 4 * (count * p * (1 - p)) ** 0.5


# ---------------------------------------------------------------------------------------------------- what prompts are


def test_text_is_encoded_with_one_beginning_of_sequence(llm: LLM) -> None:
    assert llm.encode("ab").tolist() == [BOS, 97, 98]
    assert llm.encode("<｜begin▁of▁sentence｜>ab").tolist() == [BOS, 97, 98]
    assert llm.encode([97, 98]).tolist() == [97, 98]
    assert llm.encode("").tolist() == [BOS]


def test_one_or_many_prompts_as_text_or_ids_are_answered_in_order(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    text, ids = answer(llm, "ab", max_tokens=3), answer(llm, [BOS, 97, 98], max_tokens=3)
    assert text == ids
    other = answer(llm, [5, 6], max_tokens=3)
    assert llm.generate("ab", params) == [text]
    assert llm.generate(["ab"], params) == [text]
    assert llm.generate(["ab", [5, 6], [BOS, 97, 98]], params) == [text, other, text]
    assert llm.generate(np.array([5, 6]), params) == [other]
    assert llm.generate([np.array([5, 6]), "ab"], params) == [other, text]
    assert llm.generate([5, 6], [params]) == [other]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no prompt was given"),
        ([[]], "the prompt is empty"),
        ([[1, 2], []], "the prompt is empty"),
        ([1, "a"], "mix token ids and whole prompts"),
        (["a", 1], "mix token ids and whole prompts"),
        ([1, [2]], "mix token ids and whole prompts"),
        ([[1, 320]], "token id 320 at index 1 is not in the vocabulary; accepted are 0 to 319"),
        ([[-1]], "token id -1 at index 0"),
        ([[1, 2.0]], "token id 2.0 at index 1 is not a whole number"),
        ([[True]], "token id True at index 0"),
        ([["a"]], "token id 'a' at index 0"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(llm: LLM, given: list[object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        llm.generate(given)


def test_as_many_parameters_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 sampling parameters were given for 1 prompts"):
        llm.generate("a", [SamplingParams(), SamplingParams()])


def test_refusals_come_before_anything_runs(llm: LLM) -> None:
    before = llm.work.layer_rows
    with pytest.raises(UserError, match="token id 999"):
        llm.stream([[1, 2], [999]])  # not even the first prompt is read
    assert llm.work.layer_rows == before


# --------------------------------------------------------------------------------------------------- how answers end


def test_answers_end_at_the_end_of_the_context(llm: LLM) -> None:
    for length, fitting in ((62, 2), (63, 1), (64, 1)):
        result = answer(llm, list(range(length)), max_tokens=20, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (fitting, "length")


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="the prompt has 65 tokens; the model's context is 64 tokens"):
        llm.generate(list(range(65)))


def test_the_end_token_stops_one_request_of_a_batch_and_can_be_ignored(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = llm.generate(prompts(), SamplingParams(max_tokens=8, seed=1))
    end = free[1].token_ids[2]
    monkeypatch.setattr(llm.model, "config", replace(llm.model.config, eos_token_id=end))
    ended = llm.generate(prompts(), SamplingParams(max_tokens=8, seed=1))
    for before, after in zip(free, ended, strict=True):
        taken = before.token_ids.index(end) + 1 if end in before.token_ids else 8
        assert after.token_ids == before.token_ids[:taken]
        assert after.finish_reason == ("stop" if end in before.token_ids else "length")
    assert len(ended[1].token_ids) == 3
    assert llm.generate(prompts(), SamplingParams(max_tokens=8, seed=1, ignore_eos=True)) == free


def test_a_stop_string_ends_an_answer_before_it(llm: LLM) -> None:
    found = llm.generate(prompts(), SamplingParams(max_tokens=12, seed=1))
    index, free = next((index, result) for index, result in enumerate(found) if len(result.text) > 4)
    stop = free.text[2:4]
    result = answer(llm, prompts()[index], max_tokens=12, stop=(stop,))
    assert result.text == free.text.partition(stop)[0]
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: len(result.token_ids)]


# -------------------------------------------------------------------------------------------------------- streams


def test_pieces_add_up_to_the_results_and_say_whose_they_are(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, seed=1) for count in (7, 2, 9, 4)]
    results = llm.generate(prompts(), params)
    texts, tokens, last = [""] * 4, [[] for _ in range(4)], [None] * 4
    for piece in llm.stream(prompts(), params):
        assert last[piece.index] is None, "a piece came after the last one"
        texts[piece.index] += piece.text
        tokens[piece.index].append(piece.token_id)
        last[piece.index] = piece.result
    assert last == results
    assert texts == [result.text for result in results]
    assert tokens == [result.token_ids for result in results]
    assert any(texts)


def test_two_streams_at_once_do_not_disturb_each_other(llm: LLM) -> None:
    alone = [answer(llm, prompt) for prompt in prompts()[:2]]
    streams = [llm.stream([prompt], SamplingParams(max_tokens=6, seed=1)) for prompt in prompts()[:2]]
    found: list[Result | None] = [None, None]
    for pieces in zip(*streams, strict=True):
        for place, piece in enumerate(pieces):
            found[place] = piece.result
    assert found == alone


def test_progress_of_reading_counts_every_prompt_token(folder: Path) -> None:
    seen: list[int] = []
    one = LLM(folder, threads=1, chunk=8)
    list(one.stream(prompts(), SamplingParams(max_tokens=1), on_prefill=seen.append))
    assert sum(seen) == sum(LENGTHS)
    assert len(seen) > len(LENGTHS)


def test_timings_and_work_add_up(folder: Path) -> None:
    one = LLM(folder, threads=1)
    assert one.timings.load_s > 0
    answer(one, prompts()[3], max_tokens=3, ignore_eos=True)
    assert one.timings.prefill_s > 0
    assert one.timings.decode_s > 0
    assert one.timings.ttft_s >= one.timings.prefill_s
    assert one.work.layer_rows == 4 * 33 + 3 * 8 + 2 * 7  # four encoder layers, three of the decoder, two steps of all
    assert (one.work.producer_rows, one.work.replayed_rows) == (25, 8)


# ---------------------------------------------------------------------------------------------------------- models


def test_options_out_of_range_are_refused(folder: Path) -> None:
    for options, words in (
        ({"mode": "fast"}, "mode is 'fast'; accepted are 'replay' and 'full'"),
        ({"chunk": 0}, "a chunk of 0 tokens"),
        ({"threads": 0}, "0 threads are not possible"),
    ):
        with pytest.raises(UserError, match=words):
            LLM(folder, **options)
    with pytest.raises(UserError, match="does not exist"):
        LLM(folder / "nowhere")


def test_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    bare = tiny_checkpoint(tmp_path, tiny_config(engram=False, vision=False, draft=False))
    (bare / "tokenizer.json").unlink()
    llm = LLM(bare, threads=1)
    result = answer(llm, [5, 6])
    assert len(result.token_ids) == 6
    assert result.text == ""
    with pytest.raises(UserError, match=r"no tokenizer\.json, so only token ids are accepted"):
        llm.generate("a")


def test_ids_without_a_token_are_never_sampled(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(engram=False, vision=False, draft=False))
    small = tiny_config(engram=False, vision=False, draft=False, vocab_size=300)
    shutil.copy(tiny_checkpoint(tmp_path / "small", small) / "tokenizer.json", folder)
    llm = LLM(folder, threads=1)
    hot = SamplingParams(max_tokens=30, temperature=50.0, seed=3, ignore_eos=True)
    found = {token_id for result in llm.generate(prompts(), hot) for token_id in result.token_ids}
    assert len(found) > 40  # nearly uniform, so ids above 299 would come too
    assert max(found) < 300


def test_a_damaged_table_row_fails_its_request_and_no_other(tmp_path: Path) -> None:
    addressing = (healthy := LLM(FOLDER, threads=1)).model.addressing
    assert addressing is not None
    ids = addressing.compress(np.arange(100))
    rows = [addressing.row_ids(addressing.history(ids[i : i + 1], addressing.fresh()))[0, 1] for i in range(100)]
    row = int(rows[7][0])
    good = next(token_id for token_id in range(100) if row not in rows[token_id])
    change = damage.set_byte("layers.4.engram.embed.weight", row * 32 + 5, 0x7F)
    damaged = LLM(damage.copy_with(FOLDER, tmp_path / "damaged", change), threads=1)
    with pytest.raises(UserError, match=f"table of layer 4: row {row} holds an E4M3 NaN code"):
        damaged.generate([7])
    assert answer(damaged, [good], max_tokens=1) == answer(healthy, [good], max_tokens=1)


def test_a_closed_model_lets_go_of_its_weights(folder: Path) -> None:
    with LLM(folder, threads=1) as one:
        assert one.model is not None
    with pytest.raises(AttributeError):
        _ = one.model
    one.close()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    change = damage.set_byte("layers.0.attn.wkv.scale", 0, 255)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.scale .* 255"):
        LLM(damage.copy_with(FOLDER, tmp_path / "damaged", change))
