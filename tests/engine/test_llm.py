"""`LLM`: answers, batches, refusals and streams, on a random model whose ids below 256 are bytes."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams, Structured
from headrace.core.errors import CapacityError, CheckpointError, UserError
from headrace.engine.result import Result
from headrace.models.deepseek_v41.batch import Mode, Span
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from tests import damage
from tests.engine.results import told, working_steps
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER

MODES: tuple[Mode, ...] = ("full", "replay")
LENGTHS = (5, 17, 8, 33)
BOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("engine"), tiny_config(vision=False, max_position_embeddings=64))


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepseekV41:
    return load_model(folder).model


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1, chunk=8, is_audited=True) as one:
        yield one


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, length).tolist() for length in LENGTHS]


def answer(llm: LLM, prompt: str | list[int], **params: object) -> Result:
    (result,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 6, "seed": 1, **params}))
    return result


# -------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("mode", MODES)
def test_greedy_answers_are_those_of_the_model_step_by_step(llm: LLM, model: DeepseekV41, mode: Mode) -> None:
    ids = prompts()[3]
    result = answer(llm, ids, max_tokens=8, mode=mode)
    state, tokens, logprobs = model.new_state(), [], []
    rows = len(ids) if mode == "full" else model.config.window
    span = Span(state, np.array(ids), rows, is_replay=mode == "replay")
    for _ in range(8):
        logits = model.forward([span]).logits[-1]
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1).max()))
        span = Span(state, np.array(tokens[-1:]), 1)
    assert (result.token_ids, result.logprobs) == (tokens, logprobs)
    assert result.finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (33, 8)


def test_full_mode_answers_are_those_of_reading_everything_anew_each_time(llm: LLM, model: DeepseekV41) -> None:
    ids = prompts()[1]
    result = answer(llm, ids, max_tokens=5, mode="full")
    for token_id, logprob in zip(result.token_ids, result.logprobs or [], strict=True):
        logits = model.forward([Span(model.new_state(), np.array(ids), len(ids))]).logits[-1]
        assert (token_id, logprob) == (int(logits.argmax()), float(torch.log_softmax(logits, -1).max()))
        ids.append(token_id)


def test_modes_differ_on_prompts_longer_than_the_window_only(folder: Path, llm: LLM) -> None:
    short, long = prompts()[0], prompts()[3]
    with LLM(folder, threads=1, mode="full") as full:
        assert (full.mode, llm.mode) == ("full", "replay")
        assert answer(full, short).logprobs == answer(llm, short).logprobs
        assert answer(full, long).logprobs != answer(llm, long).logprobs
        assert told(answer(full, long)) == told(answer(llm, long, mode="full"))
        assert told(answer(full, long, mode="replay")) == told(answer(llm, long))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_the_bits_of_solo_runs(llm: LLM, mode: Mode, temperature: float) -> None:
    params = [
        SamplingParams(max_tokens=count, temperature=temperature, seed=count, ignore_eos=True, mode=mode)
        for count in (9, 3, 12, 6)  # they end at different steps
    ]
    together = [told(result) for result in llm.generate(prompts(), params)]
    solo = [told(llm.generate([prompt], one)[0]) for prompt, one in zip(prompts(), params, strict=True)]
    assert together == solo
    assert [len(result.token_ids) for result in together] == [9, 3, 12, 6]


@pytest.mark.parametrize("chunk", [1, 16])
def test_the_chunk_size_changes_no_answer(folder: Path, llm: LLM, chunk: int) -> None:
    with LLM(folder, threads=1, chunk=chunk) as other:
        assert told(answer(other, prompts()[3])) == told(answer(llm, prompts()[3]))


def test_answers_do_not_depend_on_earlier_ones(llm: LLM) -> None:
    first = answer(llm, prompts()[2])
    answer(llm, prompts()[3])
    assert told(answer(llm, prompts()[2])) == told(first)


def test_log_probabilities_are_of_the_model_and_left_out_on_request(llm: LLM, model: DeepseekV41) -> None:
    cold, hot = answer(llm, prompts()[0], max_tokens=1), answer(llm, prompts()[0], max_tokens=1, temperature=5.0)
    logits = model.forward([Span(model.new_state(), np.array(prompts()[0]), 5)]).logits[-1]
    expected = torch.log_softmax(logits, -1)
    for result in (cold, hot):
        assert result.logprobs == [float(expected[result.token_ids[0]])]
    assert answer(llm, prompts()[0], logprobs=False).logprobs is None


def test_a_seed_repeats_an_answer_and_a_missing_one_is_drawn_and_reported(llm: LLM) -> None:
    hot = {"temperature": 1.0, "max_tokens": 12}
    first = answer(llm, prompts()[0], **hot, seed=None)
    assert told(answer(llm, prompts()[0], **hot, seed=first.seed)) == told(first)
    answers = {tuple(answer(llm, prompts()[0], **hot, seed=seed).token_ids) for seed in range(5)}
    assert len(answers) == 5


def test_sampled_tokens_follow_the_probabilities_of_the_model(llm: LLM, model: DeepseekV41) -> None:
    """The three most probable first tokens come as often as they should (binomial, four standard deviations)."""
    count = 120
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in range(count)]
    found = [result.token_ids[0] for result in llm.generate([prompts()[0]] * count, params)]
    logits = model.forward([Span(model.new_state(), np.array(prompts()[0]), 5)]).logits[-1]
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
    def answers(*given: object) -> list[Result]:
        return [told(result) for result in llm.generate(*given)]

    params = SamplingParams(max_tokens=3, seed=1)
    text, ids = told(answer(llm, "ab", max_tokens=3)), told(answer(llm, [BOS, 97, 98], max_tokens=3))
    assert text == ids
    other = told(answer(llm, [5, 6], max_tokens=3))
    assert answers("ab", params) == [text]
    assert answers(["ab"], params) == [text]
    assert answers(["ab", [5, 6], [BOS, 97, 98]], params) == [text, other, text]
    assert answers(np.array([5, 6]), params) == [other]
    assert answers([np.array([5, 6]), "ab"], params) == [other, text]
    assert answers([5, 6], [params]) == [other]


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
        (3, "the prompt is 3"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(llm: LLM, given: list[object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        llm.generate(given)


def test_as_many_parameters_as_prompts_are_needed(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 sampling parameters were given for 1 prompts"):
        llm.generate("a", [SamplingParams(), SamplingParams()])


def test_refusals_come_before_anything_runs(llm: LLM) -> None:
    before = working_steps(llm)
    with pytest.raises(UserError, match="token id 999"):
        llm.stream([[1, 2], [999]])  # not even the first prompt is read
    assert working_steps(llm) == before


# --------------------------------------------------------------------------------------------------- how answers end


def test_answers_end_at_the_end_of_the_context(llm: LLM) -> None:
    for length, fitting in ((62, 2), (63, 1), (64, 1)):
        result = answer(llm, list(range(length)), max_tokens=20, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (fitting, "length")


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="the prompt has 65 tokens; the model's context is 64 tokens"):
        llm.generate(list(range(65)))


def test_the_end_token_stops_one_request_of_a_batch_and_can_be_ignored(folder: Path, llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, seed=1)
    free = llm.generate(prompts(), params)
    end = free[1].token_ids[2]
    other = shutil.copytree(folder, tmp_path / "other end")
    document = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(document | {"eos_token_id": end}))
    with LLM(other, threads=1) as ending:
        ended = ending.generate(prompts(), params)
        ignoring = ending.generate(prompts(), SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    for before, after in zip(free, ended, strict=True):
        taken = before.token_ids.index(end) + 1 if end in before.token_ids else 8
        assert after.token_ids == before.token_ids[:taken]
        assert after.finish_reason == ("stop" if end in before.token_ids else "length")
    assert len(ended[1].token_ids) == 3
    assert [result.token_ids for result in ignoring] == [result.token_ids for result in free]


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
    results = [told(result) for result in llm.generate(prompts(), params)]
    texts, tokens, last = [""] * 4, [[] for _ in range(4)], [None] * 4
    for piece in llm.stream(prompts(), params):
        assert last[piece.index] is None, "a piece came after the last one"
        texts[piece.index] += piece.text
        tokens[piece.index].append(piece.token_id)
        last[piece.index] = piece.result
    assert [told(result) for result in last if result is not None] == results
    assert texts == [result.text for result in results]
    assert tokens == [result.token_ids for result in results]
    assert any(texts)


def test_two_streams_at_once_do_not_disturb_each_other(llm: LLM) -> None:
    alone = [told(answer(llm, prompt)) for prompt in prompts()[:2]]
    streams = [llm.stream([prompt], SamplingParams(max_tokens=6, seed=1)) for prompt in prompts()[:2]]
    found: list[Result | None] = [None, None]
    for pieces in zip(*streams, strict=True):
        for place, piece in enumerate(pieces):
            found[place] = piece.result
    assert [told(result) for result in found if result is not None] == alone


def test_progress_of_reading_counts_every_prompt_token(llm: LLM) -> None:
    llm.clear_cache()
    for _ in range(2):  # the second time, what was found in the cache counts too
        seen: list[int] = []
        list(llm.stream(prompts(), SamplingParams(max_tokens=1), on_prefill=seen.append))
        assert sum(seen) == sum(LENGTHS)
        assert len(seen) >= len(LENGTHS)


def test_timings_and_work_are_those_of_each_request(llm: LLM) -> None:
    llm.clear_cache()
    assert llm.timings.load_s > 0
    before = llm.timings.prefill_s
    result, other = llm.generate([prompts()[3], prompts()[0]], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    timings, work = result.timings, result.work
    assert timings.prefill_s > 0
    assert timings.decode_s > 0
    assert timings.queue_s >= 0
    assert timings.ttft_s >= timings.prefill_s
    assert work.layer_rows == 4 * 33 + 3 * 8 + 2 * 7  # four encoder layers, three of the decoder, two steps of all
    assert (work.producer_rows, work.replayed_rows, work.reencoded_rows, work.preemptions) == (25, 8, 0, 0)
    assert (other.work.layer_rows, other.work.replayed_rows) == (7 * 5 + 2 * 7, 5)
    assert llm.timings.prefill_s == pytest.approx(before + timings.prefill_s + other.timings.prefill_s)


# ---------------------------------------------------------------------------------------------------------- models


def test_options_out_of_range_are_refused(folder: Path) -> None:
    for options, words in (
        ({"mode": "fast"}, "mode is 'fast'; accepted are 'replay', 'full'"),
        ({"chunk": 0}, "a chunk of 0 tokens"),
        ({"threads": 0}, "0 threads are not possible"),
        ({"resume": "maybe"}, "resume is 'maybe'; accepted are 'exact', 'replay'"),
        ({"num_slots": 0}, "num_slots is 0; accepted is a whole number from 1"),
        ({"slots": 3}, "option 'slots' is unknown; accepted are mode, resume,"),
    ):
        with pytest.raises(UserError, match=words):
            LLM(folder, **options)
    with pytest.raises(UserError, match="does not exist"):
        LLM(folder / "nowhere")


def test_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    bare = tiny_checkpoint(tmp_path, tiny_config(engram=False, vision=False, draft=False))
    (bare / "tokenizer.json").unlink()
    with LLM(bare, threads=1) as llm:
        result = answer(llm, [5, 6])
        assert len(result.token_ids) == 6
        assert result.text == ""
        with pytest.raises(UserError, match=r"no tokenizer\.json, so only token ids are accepted"):
            llm.generate("a")
        with pytest.raises(UserError, match=r"no tokenizer\.json, so no structure"):
            llm.generate([1, 2], SamplingParams(structured=Structured.regex("a")))


def test_ids_without_a_token_are_never_sampled(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(engram=False, vision=False, draft=False))
    small = tiny_config(engram=False, vision=False, draft=False, vocab_size=300)
    shutil.copy(tiny_checkpoint(tmp_path / "small", small) / "tokenizer.json", folder)
    hot = SamplingParams(max_tokens=30, temperature=50.0, seed=3, ignore_eos=True)
    with LLM(folder, threads=1) as llm:
        found = {token_id for result in llm.generate(prompts(), hot) for token_id in result.token_ids}
    assert len(found) > 40  # nearly uniform, so ids above 299 would come too
    assert max(found) < 300


def test_a_damaged_table_row_fails_its_request_and_no_other(tmp_path: Path) -> None:
    addressing = load_model(FOLDER).model.addressing
    assert addressing is not None
    ids = addressing.compress(np.arange(100))
    rows = [addressing.row_ids(addressing.history(ids[i : i + 1], addressing.fresh()))[0, 1] for i in range(100)]
    row = int(rows[7][0])
    good = next(token_id for token_id in range(100) if row not in rows[token_id])
    change = damage.set_byte("layers.4.engram.embed.weight", row * 32 + 5, 0x7F)
    with LLM(FOLDER, threads=1) as healthy:
        expected = told(answer(healthy, [good], max_tokens=1))
    with LLM(damage.copy_with(FOLDER, tmp_path / "damaged", change), threads=1, is_audited=True) as damaged:
        with pytest.raises(UserError, match=f"table of layer 4: row {row} holds an E4M3 NaN code"):
            damaged.generate([7])
        assert told(answer(damaged, [good], max_tokens=1)) == expected


def test_a_closed_model_is_gone_and_says_so(folder: Path) -> None:
    with LLM(folder, threads=1) as one:
        pid = one.status()["pid"]
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(UserError, match="this LLM was closed"):
        one.generate([1])
    one.close()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    change = damage.set_byte("layers.0.attn.wkv.scale", 0, 255)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.scale .* 255"):
        LLM(damage.copy_with(FOLDER, tmp_path / "damaged", change))
