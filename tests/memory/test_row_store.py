"""Rows are the same bits from every source, with every cache, announced or not; and every read is accounted for."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import CheckpointError, InternalError, UserError
from headrace.memory.read_source import ReadSource
from headrace.memory.row_counts import NgramReads, RowReads
from tests.memory.stores import COLUMNS, HEAD_DIM, KINDS, READING, ROWS, Tables, bits, rows_of, same, some_ids

ROW_BYTES = HEAD_DIM + HEAD_DIM // 32
CACHES = (0, 1, 1200, 5000, 20_000, 10**6)
CHUNKS = ([61], [1] * 61, [7, 1, 30, 23], [60, 1])


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables.write(tmp_path)


def pieces(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_bytes", CACHES)
@pytest.mark.parametrize("sizes", CHUNKS, ids=["one piece", "single tokens", "pieces", "all but one"])
@pytest.mark.parametrize("is_announced", [False, True], ids=["on demand", "ahead"])
def test_rows_are_the_same_bits(
    tables: Tables, kind: str, cache_bytes: int, sizes: list[int], is_announced: bool
) -> None:
    ids = some_ids(61)
    store = tables.store(kind, cache_bytes=cache_bytes)
    found: list[list[torch.Tensor]] = []
    chunks = pieces(sizes)
    for place, chunk in enumerate(chunks):
        if is_announced and place + 1 < len(chunks):
            store.announce(ids[chunks[place + 1]])
        found.append(rows_of(store, ids[chunk]))
    assert same([torch.cat(parts) for parts in zip(*found, strict=True)], tables.expected(ids))
    for counts in store.counts.layers.values():
        assert counts.requested == 61 * COLUMNS
        assert counts.read == counts.requested - counts.hits
        assert counts.read_bytes == counts.read * ROW_BYTES
        assert counts.read <= counts.unique
        assert counts.unused == 0
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_reads_counted_are_reads_done(tables: Tables, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the source, not where the counts are made."""
    store = tables.store(kind, cache_bytes=6000)
    asked = dict.fromkeys(ROWS, 0)
    for source in store.sources:
        start = source.start

        def counted(row_ids: np.ndarray, *rest: object, start=start, layer_id=source.layer_id, **more: bool) -> object:
            assert (np.diff(row_ids) > 0).all()
            asked[layer_id] += len(row_ids)
            return start(row_ids, *rest, **more)

        monkeypatch.setattr(source, "start", counted)
    for seed in range(5):
        rows_of(store, some_ids(40, seed))
    assert asked == {layer_id: counts.read for layer_id, counts in store.counts.layers.items()}
    assert 0 < store.counts.total.hits < store.counts.total.requested == 5 * 40 * COLUMNS * len(ROWS)
    store.close()


def test_a_roomy_cache_reads_every_row_once(tables: Tables) -> None:
    store = tables.store("read", cache_bytes=10**7)
    ids = some_ids(500)
    for chunk in pieces([100] * 5):
        rows_of(store, ids[chunk])
    for place, counts in enumerate(store.counts.layers.values()):
        assert counts.read == len(np.unique(ids[:, place]))
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_announcements_cost_reads_only(tables: Tables, kind: str) -> None:
    ids = some_ids(30)
    store = tables.store(kind, cache_bytes=3000, max_ahead=16)
    store.announce(some_ids(40, seed=9))
    store.announce(ids[:10][::-1])
    assert same(rows_of(store, ids), tables.expected(ids))
    store.forget()
    total = store.counts.total
    assert total.unused > 0
    assert total.requested - total.unused == 30 * COLUMNS * len(ROWS)
    assert total.read == total.requested - total.hits
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_alike_in_one_batch_are_announced_once(tables: Tables, kind: str) -> None:
    ids = np.concatenate([some_ids(3)] * 4)
    store = tables.store(kind)
    store.announce(ids)
    assert same(rows_of(store, ids), tables.expected(ids))
    for counts in store.counts.layers.values():
        assert (counts.requested, counts.read) == (12 * COLUMNS, counts.unique)
        assert counts.read == counts.requested - counts.hits
    store.close()


def test_no_more_is_kept_ahead_than_allowed(tables: Tables) -> None:
    store = tables.store("memory", max_ahead=5)
    for seed in range(20):
        store.announce(some_ids(3, seed))
    assert len(store._ahead) <= 5
    store.forget()
    assert store.counts.total.unused == store.counts.total.requested
    store.announce(some_ids(1))
    assert len(store._under_way) == len(ROWS)  # what was given up is not waited for


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_bytes", [0, 10**6])
def test_damaged_rows_fail_their_tokens_and_are_never_kept(tables: Tables, kind: str, cache_bytes: int) -> None:
    codes, scales = tables.arrays[14]
    codes[5, 7], scales[6, 1] = 0xFF, 255
    tables.save()
    ids = some_ids(8) % 4 + 20
    ids[2, 1, 3], ids[6, 1, 0], ids[6, 1, 5] = 5, 6, 5
    healthy = tables.expected(np.delete(ids, [2, 6], axis=0))
    store = tables.store(kind, cache_bytes=cache_bytes)
    for _ in range(2):
        collected = store.collect(ids)
        assert collected.layer(1)[1] == {}
        rows, faults = collected.layer(14)
        assert sorted(faults) == [2, 6]
        assert faults[2].message.endswith("layer 14: row 5 holds an E4M3 NaN code; the checkpoint is damaged")
        assert "row 6 holds a scale byte of 255 (NaN)" in faults[6].message
        assert torch.isfinite(rows).all()
        assert torch.equal(*bits([np_delete(rows, [2, 6]), healthy[1]]))
    store.close()


def np_delete(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    return rows[[place for place in range(len(rows)) if place not in places]]


WITH_AND_WITHOUT_A_COMPILER = pytest.mark.parametrize("is_native", [True, False], ids=["compiled", "plain Python"])


@WITH_AND_WITHOUT_A_COMPILER
@pytest.mark.parametrize("kind", READING)
def test_rows_are_read_by_compiled_threads_and_by_pythons(tables: Tables, kind: str, is_native: bool) -> None:
    """Without a compiler both are the second."""
    ids = some_ids(300)
    ids[:40] = np.arange(40)[:, None, None]  # neighbours
    store = tables.store(kind, is_native=is_native, cache_bytes=2000)
    found = [rows_of(store, ids[chunk]) for chunk in pieces([100, 100, 1, 99])]
    assert same([torch.cat(parts) for parts in zip(*found, strict=True)], tables.expected(ids))
    store.close()


@WITH_AND_WITHOUT_A_COMPILER
def test_a_closed_store_reads_nothing_more(tables: Tables, is_native: bool) -> None:
    store = tables.store("read", is_native=is_native)
    store.close()
    with pytest.raises(InternalError, match="after their reader was closed"):
        store.collect(some_ids(3))


def test_many_requests_at_once_are_read_whole(tmp_path: Path) -> None:
    """More parts than threads, urgent ones between, and requests that nobody waits for."""
    tables = Tables.write(tmp_path)
    store = tables.store("read", workers=4, max_ahead=400)
    ids = some_ids(4000)
    for low in range(0, 4000, 100):
        store.announce(ids[low : low + 100])
    for low in (0, 3900, 2000, 3600):
        part = ids[low : low + 100]
        assert same(rows_of(store, part), tables.expected(part))
    store.close()


@WITH_AND_WITHOUT_A_COMPILER
@pytest.mark.parametrize("kind", READING)
def test_a_file_that_became_shorter_fails_the_tokens_that_need_its_end(
    tables: Tables, kind: str, is_native: bool
) -> None:
    store = tables.store(kind, is_native=is_native)
    file = tables.file(1, "codes")
    with file.open("r+b") as opened:
        opened.truncate(4099 + 250 * HEAD_DIM + 3)
    ids = some_ids(6) % 250
    ids[3, 0, 2] = 250
    collected = store.collect(ids)
    rows, faults = collected.layer(1)
    assert list(faults) == [3]
    assert isinstance(faults[3], CheckpointError)
    assert faults[3].message == (
        f"n-gram table of layer 1: row 250 cannot be read from {file}: the file has become shorter"
    )
    healthy = tables.expected(np.delete(ids, [3], axis=0))[0]
    assert torch.equal(*bits([np_delete(rows, [3]), healthy]))
    store.close()


def test_a_disk_that_fails_fails_the_tokens_that_need_it(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tables.store("read", is_native=False, cache_bytes=10**6)
    source = store.sources[1]
    read = source.read

    def broken(part: int, row_ids: np.ndarray, out: np.ndarray) -> None:
        if part == 0 and 33 in row_ids:
            raise OSError(5, "Input/output error")
        read(part, row_ids, out)

    monkeypatch.setattr(source, "read", broken)
    ids = some_ids(9) % 30
    ids[4, 1, 1] = 33
    faults = store.collect(ids).layer(14)[1]
    assert list(faults) == [4]
    assert "row 33 cannot be read from" in faults[4].message
    assert faults[4].message.endswith("Input/output error")
    monkeypatch.setattr(source, "read", read)
    assert store.collect(ids).layer(14)[1] == {}  # and is not remembered
    store.close()


@pytest.mark.parametrize("part", [0, 1], ids=["codes", "scales"])
def test_reads_that_the_system_refuses_fail_their_tokens(tables: Tables, part: int) -> None:
    """A folder can be opened, and every read of it fails."""
    store = tables.store("read", cache_bytes=10**6)
    source, folder = store.sources[1], os.open(tables.folder, os.O_RDONLY)
    assert isinstance(source, ReadSource)
    kept = os.dup(source._files[part])
    os.dup2(folder, source._files[part])
    ids = some_ids(5)
    collected = store.collect(ids)
    assert torch.equal(*bits([collected.layer(1)[0], tables.expected(ids)[0]]))
    rows, faults = collected.layer(14)
    assert sorted(faults) == [0, 1, 2, 3, 4]
    assert faults[3].message.endswith(": Is a directory")
    assert not rows.any()
    os.dup2(kept, source._files[part])
    assert same(rows_of(store, ids), tables.expected(ids))  # and nothing of it is remembered
    store.close()
    for file in (kept, folder):
        os.close(file)


@WITH_AND_WITHOUT_A_COMPILER
def test_resident_scales_are_the_files_and_need_no_read(tables: Tables, is_native: bool) -> None:
    store = tables.store("read, scales in memory", is_native=is_native)
    other = tables.store("read")
    for source, plain in zip(store.sources, other.sources, strict=True):
        assert isinstance(source, ReadSource)
        assert isinstance(plain, ReadSource)
        assert (source.resident_bytes, plain.resident_bytes) == (source.rows * HEAD_DIM // 32, 0)
    other.close()
    for layer_id in ROWS:
        with tables.file(layer_id, "scales").open("r+b") as file:
            file.truncate(0)
    ids = some_ids(50)
    assert same(rows_of(store, ids), tables.expected(ids))
    store.close()


def test_scales_that_end_early_are_refused_where_they_are_to_be_resident(tables: Tables) -> None:
    file = tables.file(14, "scales")
    with file.open("r+b") as opened:
        opened.truncate(8 + 420 * 2 + 1)
    message = f"n-gram table of layer 14: the scales cannot be read from {file}: the file has become shorter"
    with pytest.raises(CheckpointError) as refused:
        tables.store("read, scales in memory")
    assert refused.value.message == message


@pytest.mark.parametrize("method", ["collect", "announce"])
def test_a_row_outside_its_table_is_refused(tables: Tables, method: str) -> None:
    ids = some_ids(3)
    ids[1, 1, 1] = ROWS[14]
    with pytest.raises(UserError, match="row 421 is outside the n-gram table of layer 14; accepted are 0 to 420"):
        getattr(tables.store("memory"), method)(ids)


def test_missing_files_are_refused_at_once(tables: Tables) -> None:
    tables.file(14, "scales").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*14\.scales: No such file or directory"):
        tables.store("read")


def test_counts_add_up_and_are_told_apart() -> None:
    reads = NgramReads()
    reads.of(1).add(RowReads(requested=5, unique=4, hits=2, read=3, read_bytes=30, wait_s=0.5))
    before = NgramReads()
    before.add(reads)
    reads.of(14).add(RowReads(requested=7, unique=7, read=7, read_bytes=70))
    grown = reads.since(before)
    assert grown.layers == {1: RowReads(), 14: RowReads(requested=7, unique=7, read=7, read_bytes=70)}
    assert reads.total == RowReads(requested=12, unique=11, hits=2, read=10, read_bytes=100, wait_s=0.5)
