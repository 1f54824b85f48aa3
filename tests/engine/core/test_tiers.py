"""Cached prompts that left the pool, or outlived their engine: what comes back, from where, and for whom."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cache.tiers import fetch
from headrace.cache.tiers.fetch import Job
from headrace.cache.tiers.files import Files
from headrace.core.errors import UserError
from headrace.engine.core.core import EngineCore
from headrace.engine.core.options import EngineOptions
from headrace.engine.result import Result
from tests.engine.core.serving import SEEDED, Client, alone, answer, core, params, prompt, said

FIRST = prompt(300)
WHOLE = 256  # tokens of its whole blocks


@contextmanager
def engine(folder: Path | None = None, **options: Any) -> Iterator[EngineCore]:
    made = core(cache_dir=None if folder is None else str(folder), min_free_disk=0, **options)
    try:
        yield made
    finally:
        made.close()


def ask(one: EngineCore, ids: list[int], **values: Any) -> Result:
    return answer(one, ids, params(**values))


def longer(result: Result) -> list[int]:
    return [*FIRST, *result.token_ids, *prompt(90, seed=5)]


# ------------------------------------------------------------------------------------------------------------ restart


@pytest.mark.parametrize("policy", ["none", "periodic", "full"])
def test_after_a_restart_exact_requests_say_what_a_fresh_engine_says(policy: str, tmp_path: Path) -> None:
    options = {"window_policy": policy, "checkpoint_every": 128}
    with engine(tmp_path, **options) as one:
        first = ask(one, FIRST, **SEEDED)
    ids = longer(first)
    with engine(tmp_path, **options) as one:
        second = ask(one, ids, **SEEDED)
    assert said(second) == alone(tuple(ids), **SEEDED)
    assert not second.is_approximate
    assert second.usage.cached_tokens_by_tier == {"device": 0, "host": 0, "disk": WHOLE}
    shape = one.model.state_shape
    rebuilt = shape.decoder_start * (shape.window - 1)
    assert second.work.reencoded_rows in ({rebuilt, rebuilt + 1} if policy == "none" else {0})
    assert second.work.layer_rows < first.work.layer_rows


def test_after_a_restart_a_conversation_goes_on_by_replay(tmp_path: Path) -> None:
    with engine(tmp_path, resume="replay") as one:
        first = ask(one, FIRST)
        assert said(first) == alone(tuple(FIRST))
    ids = longer(first)
    with engine(tmp_path, resume="replay") as one:
        second = ask(one, ids)
        assert second.is_approximate
        assert second.usage.cached_tokens_by_tier == {"device": 0, "host": 0, "disk": WHOLE}
        assert second.work.reencoded_rows == one.model.config.window
        (hit,) = [step for trace in one.traces.newest() for step in trace.requests if step.cached_tokens]
        assert (hit.cached_tokens, hit.cached_blocks) == (WHOLE, {"device": 0, "host": 0, "disk": 2})
        # what it stored is of the approximate lineage, and exact requests never read that
        exact = ask(one, ids, resume="exact")
        assert said(exact) == alone(tuple(ids))
        assert (exact.is_approximate, exact.usage.cached_tokens) == (False, WHOLE)
    third_ids = [*ids, *second.token_ids, *prompt(90, seed=6)]
    with engine(tmp_path, resume="replay") as one:
        third = ask(one, third_ids)
        assert third.is_approximate
        assert third.usage.cached_tokens_by_tier["disk"] == len(ids) // 128 * 128
    size = sum(record.live for record in _segments(tmp_path))
    blocks = len(third_ids) // 128 + len(ids) // 128 * 2
    assert size < blocks * one.memory.block_bytes  # a block of both lineages is there once


def _segments(folder: Path) -> list[Any]:
    with engine(folder) as one:
        assert one.cache.tiers is not None
        assert one.cache.tiers.disk is not None
        return one.cache.tiers.disk.store.index.segments()


def test_salts_and_checkpoints_share_nothing_on_disk(tmp_path: Path) -> None:
    options = {"window_policy": "full"}
    with engine(tmp_path, **options) as one:
        ask(one, FIRST, cache_salt="a")
    with engine(tmp_path, **options) as one:
        assert ask(one, FIRST).usage.cached_tokens == 0
        assert ask(one, FIRST, cache_salt="b").usage.cached_tokens == 0
        assert ask(one, [*FIRST, 1], cache_salt="a").usage.cached_tokens == WHOLE


def test_blocks_of_an_answer_are_on_disk_before_it_ends(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        client = Client(one)
        client.submit("one", FIRST[:120], params(max_tokens=20))
        while one.counts["decode"] == 0 or len(client.tokens.get(("one", 0), [])) < 12:
            client.step()
        assert one.cache.tiers is not None
        assert one.cache.tiers.disk is not None
        assert one.cache.tiers.disk.flush()
        assert one.cache.tiers.disk.written == 1
        client.finish()


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    with engine(tmp_path, window_policy="full") as one, engine(tmp_path, window_policy="full") as two:
        first = ask(one, FIRST)
        assert one.cache.tiers is not None
        assert one.cache.tiers.disk is not None
        assert one.cache.tiers.disk.flush()
        second = ask(two, [*FIRST, 5])
        assert second.usage.cached_tokens_by_tier["disk"] == WHOLE
        assert said(second) == alone((*FIRST, 5))
        assert said(first) == alone(tuple(FIRST))


def test_a_cleared_directory_gives_nothing_back(tmp_path: Path) -> None:
    with engine(tmp_path, window_policy="full", host_cache_bytes=1 << 20) as one:
        ask(one, FIRST)
        assert one.clear_cache()
        assert ask(one, [*FIRST, 5]).usage.cached_tokens_by_tier["disk"] == WHOLE  # the directory outlives that
        ask(one, [*FIRST, 5], cache_salt="a")
        assert one.clear_cache(disk=True)
        one.step()
        assert ask(one, [*FIRST, 5], max_tokens=1).usage.cached_tokens == 0
        assert ask(one, [*FIRST, 5], cache_salt="a").usage.cached_tokens == 0
        assert one.clear_cache(disk=True)
    with engine(tmp_path, window_policy="full") as one:
        assert ask(one, [*FIRST, 5]).usage.cached_tokens == 0
        assert said(ask(one, [*FIRST, 5])) == alone((*FIRST, 5))


# ---------------------------------------------------------------------------------------------------------------- host


def test_blocks_that_had_to_leave_the_pool_come_back_from_host_memory() -> None:
    with engine(host_cache_bytes=1 << 22, cache_tokens=640, resume="replay", snapshot_bytes=0) as one:
        first = ask(one, FIRST)
        for seed in (3, 4):
            ask(one, prompt(500, seed=seed))
        assert one.cache.tiers is not None
        assert one.cache.tiers.host is not None
        assert one.cache.tiers.host.count >= 2
        ids = longer(first)
        again = ask(one, ids)
        assert again.usage.cached_tokens_by_tier["host"] == WHOLE
        assert again.is_approximate


def test_answers_under_pressure_are_the_same_with_all_tiers(tmp_path: Path) -> None:
    """More prompts than the pool holds, several at once, over and over: every answer is that of the model alone."""
    prompts = [[*prompt(260, seed), *prompt(10 * seed, 40 + again)] for seed in (1, 2, 3, 4) for again in (0, 1)]
    options = {"host_cache_bytes": 1 << 20, "cache_tokens": 1280, "window_policy": "full", "snapshot_bytes": 60_000}
    with engine(tmp_path, **options) as one:
        client = Client(one)
        for turn in range(2):
            for place, ids in enumerate(prompts):
                client.submit(f"{turn} {place}", ids, params(seed=place, temperature=0.8))
            client.finish()
        assert not client.errors
        tiers = {name for results in client.results.values() for name, n in _tiers(results[0]).items() if n}
        for turn in range(2):
            for place, ids in enumerate(prompts):
                wanted = alone(tuple(ids), seed=place, temperature=0.8)
                assert said(client.results[f"{turn} {place}"][0]) == wanted
        assert tiers >= {"device", "host"}


def _tiers(result: Result) -> dict[str, int]:
    return dict(result.usage.cached_tokens_by_tier)


# -------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["flipped", "short", "gone", "noise"])
def test_a_damaged_directory_changes_no_answer(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(tmp_path, window_policy="full") as one:
        ask(one, FIRST)
        block = one.memory.block_bytes
    (segment,) = tmp_path.glob("*.segment")
    content = bytearray(segment.read_bytes())
    if name == "flipped":
        content[block + block // 2] ^= 1
        segment.write_bytes(content)
    elif name == "short":
        os.truncate(segment, len(content) // 2)
    elif name == "gone":
        segment.unlink()
    else:
        (tmp_path / "index.sqlite").write_bytes(b"noise" * 1000)
    with caplog.at_level(logging.WARNING), engine(tmp_path, window_policy="full") as one:
        ids = [*FIRST, 5, 6]
        result = ask(one, ids)
        assert said(result) == alone(tuple(ids))
        assert result.usage.cached_tokens < WHOLE or name == "noise"
        assert one.cache.tiers is not None
        assert one.cache.tiers.disk is not None
        assert sum(one.cache.tiers.disk.incidents.counts.values()) == 1
        assert ask(one, ids).usage.cached_tokens == len(ids)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["segments", "directory", "index", "unreadable"])
def test_harm_while_an_engine_runs_is_told_once_and_changes_no_answer(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    with caplog.at_level(logging.WARNING), engine(folder, window_policy="full") as one:
        ask(one, FIRST)
        assert one.cache.tiers is not None
        disk = one.cache.tiers.disk
        assert disk is not None
        assert disk.flush()
        disk.store._reader.close()  # what is open could still be read
        if name == "segments":
            for segment in folder.glob("*.segment"):
                segment.unlink()
        elif name == "directory":
            shutil.rmtree(folder)
        elif name == "index":
            for file in folder.glob("index*"):
                file.write_bytes(b"\x07" * file.stat().st_size)
        else:
            monkeypatch.setattr(Files, "read", _fail)
        for turn in range(3):
            one.clear_cache()
            ids = [*FIRST, 5, turn]
            assert said(ask(one, ids)) == alone(tuple(ids))
            assert disk.flush()
        counts = dict(disk.incidents.counts)
        assert counts.pop("read_error", 0) <= 9  # in each turn three records, once
        assert set(counts.values()) <= {1}
        assert len(caplog.records) <= 2
        assert one.cache.tier_status["disk_tier_dropped"] == 0
        if name == "segments":  # what was computed again was kept again
            assert ask(one, [*FIRST, 5, 9]).usage.cached_tokens >= WHOLE


def _fail(*_: object) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot use .* as a cache"):
        core(cache_dir=str(file))
    for name, value in (("window_policy", "some"), ("cache_disk_bytes", 5), ("checkpoint_every", 1)):
        with pytest.raises(UserError, match=f"^{name} is"):
            EngineOptions(**{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ loading


def test_a_load_that_would_take_longer_than_computing_is_left_out(tmp_path: Path) -> None:
    with engine(tmp_path, window_policy="full") as one:
        ask(one, FIRST)
    with engine(tmp_path, window_policy="full") as one:
        assert one.cache.tiers is not None
        rule = one.cache.tiers.rule
        rule.load_bytes.note(10, 1.0)
        rule.prefill_rows.note(1000, 1.0)
        result = ask(one, [*FIRST, 5])
        assert (result.usage.cached_tokens, rule.refused) == (0, 1)
        assert said(result) == alone((*FIRST, 5))


@pytest.mark.parametrize("resume", ["exact", "replay"])
def test_a_long_prompt_is_read_in_several_turns(resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(500, seed=2)
    with engine(tmp_path, window_policy="periodic", checkpoint_every=384) as one:
        ask(one, ids)
        monkeypatch.setattr(fetch, "STAGED_BYTES", one.memory.block_bytes)
    with engine(tmp_path, resume=resume) as one:
        result = ask(one, ids)
        assert said(result) == alone(tuple(ids))  # where windows are kept, replay has nothing to replay
        assert result.usage.cached_tokens_by_tier["disk"] == 384
        assert one.cache.tiers is not None
        assert one.cache.tiers.disk is not None
        assert one.cache.tiers.disk.loaded == 3 * 2  # in each turn a block, and the windows that decide whether it pays


def test_a_prompt_goes_on_without_what_cannot_be_read(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        ask(one, FIRST)
    with engine(tmp_path) as one:
        assert one.cache.tiers is not None
        one.cache.tiers._fetcher._read = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        result = ask(one, [*FIRST, 5])
        assert (said(result), result.usage.cached_tokens) == (alone((*FIRST, 5)), 0)
        assert one.cache.tiers.disk is not None
        assert one.cache.tiers.disk.incidents.counts == {"read_error": 1}


def test_others_run_while_a_prompt_waits_for_its_blocks(tmp_path: Path) -> None:
    with engine(tmp_path, window_policy="full") as one:
        ask(one, FIRST)
    with engine(tmp_path, window_policy="full") as one:
        assert one.cache.tiers is not None
        fetcher, gate = one.cache.tiers._fetcher, threading.Event()
        read = fetcher._fetch

        def wait_and_fetch(job: Job) -> None:
            gate.wait(60)
            read(job)

        fetcher._fetch = wait_and_fetch  # type: ignore[method-assign]
        client = Client(one)
        client.submit("waits", [*FIRST, 5], params())
        client.submit("runs", prompt(50, seed=9), params())
        client.step(12)
        assert set(client.results) == {"runs"}
        assert dict(one.traces.newest()[0].waiting)["waits/0"] == "loading"
        client.submit("cancelled", FIRST, params())
        client.step()
        one.cancel("cancelled")
        client.step(2)
        assert client.results["cancelled"][0].finish_reason == "cancelled"
        gate.set()
        client.finish()
        assert said(client.results["waits"][0]) == alone((*FIRST, 5))
        assert client.results["waits"][0].usage.cached_tokens == WHOLE


# ----------------------------------------------------------------------------------------------------------- rebuilding


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("more", [1, 5, 40, 129])
def test_windows_rebuilt_from_blocks_alone_are_exact(more: int, chunk: int) -> None:
    """Blocks are there and no window is: every suffix, every chunk, and what is taken from there afterwards."""
    ids = [*FIRST[:256], *prompt(more, seed=8)]
    with engine(host_cache_bytes=1 << 20, snapshot_bytes=0, chunk=chunk) as one:
        ask(one, FIRST)
        second = ask(one, ids, **SEEDED)
        assert said(second) == alone(tuple(ids), **SEEDED)
        assert second.usage.cached_tokens == 256
        assert second.cache_reason == f"windows rebuilt from token {_row(one, len(ids))}"
        assert second.work.reencoded_rows == 256 - _row(one, len(ids))


def _row(one: EngineCore, num_tokens: int) -> int:
    shape = one.model.state_shape
    row = min(256, num_tokens - shape.window) // 2 * 2 - shape.decoder_start * (shape.window - 1)
    return row - row % 2


def test_states_taken_while_windows_are_rebuilt_hold_no_wrong_row() -> None:
    """A snapshot of a rebuilt state serves the next turn; one from too early would say something else."""
    with engine(host_cache_bytes=1 << 20, chunk=16, snapshot_every=16) as one:
        ask(one, FIRST)
        one.cache.index.shelf.budget = 0
        for shelved in list(one.cache.index.shelf._homes):
            one.cache.index.shelf.drop(shelved)
        one.cache.index.shelf.budget = 1 << 20
        ids = [*FIRST[:256], *prompt(30, seed=8)]
        assert said(ask(one, ids)) == alone(tuple(ids))
        for cut in (250, 252, 254, 256, 262):
            other = [*ids[:cut], *prompt(20, seed=cut)]
            assert said(ask(one, other)) == alone(tuple(other))
