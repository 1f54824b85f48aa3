"""One engine for many: threads at once, iterators that close early, and engines that refuse to start."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.core.errors import CapacityError, CheckpointError, HeadraceError, OverloadedError, UserError
from tests import damage
from tests.engine.process.living import children, read_long, wait_until
from tests.engine.results import told


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1, chunk=32, num_slots=4, max_waiting=8, is_audited=True) as one:
        yield one


def is_at_rest(llm: LLM) -> bool:
    status = llm.status()
    phases = ("queued", "forking", "prefill", "decode", "swapped", "host_bytes")
    return not any(status[name] for name in phases)


def test_threads_share_an_engine_and_get_the_answers_of_solo_runs(llm: LLM) -> None:
    asked = [
        ([index % 250] * (1 + 17 * index % 70), SamplingParams(max_tokens=4 + index % 5, seed=index, temperature=heat))
        for index, heat in enumerate([0.0, 1.0] * 8)
    ]
    alone = [told(llm.generate([ids], params)[0]) for ids, params in asked]
    llm.clear_cache()
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda one: told(llm.generate([one[0]], one[1])[0]), asked * 2))
    assert together == alone * 2
    wait_until(lambda: is_at_rest(llm))
    llm.audit()


def test_closing_an_iterator_early_cancels_what_still_runs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
    pieces = llm.stream([[1, 2, 3], [4] * 90, [5]], params)
    for _ in range(4):
        next(pieces)
    assert not is_at_rest(llm)
    pieces.close()
    wait_until(lambda: is_at_rest(llm))
    assert llm.status()["free_blocks"] + llm.status()["cached_blocks"] == llm.status()["num_blocks"]
    llm.clear_cache()
    assert llm.status()["free_blocks"] == llm.status()["num_blocks"]
    never_begun = llm.stream([[1]], params)
    never_begun.close()
    assert is_at_rest(llm)


def test_an_error_of_one_prompt_cancels_the_others_of_its_call(llm: LLM) -> None:
    long = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
    with pytest.raises(CapacityError, match="5 answers at once need as many slots; there are 4"):
        llm.generate([[1, 2], [3]], [long, SamplingParams(n=5)])
    wait_until(lambda: is_at_rest(llm))


def test_one_more_than_may_wait_is_refused(llm: LLM) -> None:
    readers = read_long(llm, [[1], [2], [3], [4]])
    with pytest.raises(OverloadedError, match="8 requests wait already; accepted are 8, so try again later"):
        llm.generate([[6]] * 9, SamplingParams(max_tokens=1))
    wait_until(lambda: llm.status()["queued"] == 0)  # the eight were cancelled
    waiting = llm.stream([[6]] * 8, SamplingParams(max_tokens=1))
    llm._engine.cancel("unknown")  # nobody minds
    for reader in readers:
        reader.stop()
    assert [piece.result is not None for piece in waiting] == [True] * 8


def test_a_deadline_ends_an_answer_with_what_there_is(llm: LLM) -> None:
    free = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
    wait_until(lambda: is_at_rest(llm))
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(**{**vars(free), "deadline_s": 1.0}))
    assert result.finish_reason == "deadline"
    assert 0 < len(result.token_ids) < 1500
    (whole,) = llm.generate([[1, 2, 3]], SamplingParams(**{**vars(free), "max_tokens": len(result.token_ids)}))
    assert whole.token_ids == result.token_ids


@pytest.mark.parametrize(
    ("options", "kind", "words", "param"),
    [
        (
            {"max_memory": 1000},
            CapacityError,
            "max_memory is 1,000 bytes; one sequence of the longest kind needs",
            "max_memory",
        ),
        ({"max_rows": 20}, UserError, "max_rows is 20; accepted is 24 or more: a window of 8 rows", "max_rows"),
        ({"trace_file": "/no/such/folder/a"}, UserError, "cannot write /no/such/folder/a: No such file", "trace_file"),
    ],
)
def test_options_that_only_the_engine_can_judge_are_refused_as_before(
    folder: Path, options: dict[str, object], kind: type[HeadraceError], words: str, param: str
) -> None:
    before = children(os.getpid())
    with pytest.raises(kind, match=words) as caught:
        LLM(folder, **options)
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert children(os.getpid()) == before


def test_checkpoints_that_are_not_whole_are_refused_as_before(folder: Path, tmp_path: Path) -> None:
    before = children(os.getpid())
    name = "layers.0.attn.wkv.weight"
    with pytest.raises(CheckpointError, match=name):
        LLM(damage.copy_with(folder, tmp_path / "dropped", damage.drop(name)))
    bare = damage.copy_with(folder, tmp_path / "bare", lambda _: None)
    (bare / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(bare)
    with pytest.raises(UserError, match="does not exist"):
        LLM(tmp_path / "nowhere")
    assert children(os.getpid()) == before
