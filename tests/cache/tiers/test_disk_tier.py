"""Blocks on disk: what is kept, what goes first, how many bytes that takes, and who may share a directory."""

import errno
import os
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.tiers import index
from headrace.cache.tiers.disk_tier import DiskTier, Item
from headrace.cache.tiers.reclaim import Limits
from headrace.cache.tiers.segment import Kind
from headrace.cache.tiers.store import StoreOptions
from tests.cache.tiers.faulty import Directory, item, key, payload, put, readable


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "cache")


def test_what_is_put_is_there_at_once_and_after_a_restart(directory: Directory) -> None:
    tier = directory.open()
    put(tier, range(1, 60))
    assert readable(tier, 60) == list(range(1, 60))
    tier.close()
    assert len(directory.segments) > 1
    tier = directory.open()
    assert readable(tier, 60) == list(range(1, 60))
    assert tier.incidents.counts == {}
    tier.close()


def test_a_key_is_written_once(directory: Directory) -> None:
    tier = directory.open()
    for _ in range(3):
        put(tier, range(1, 8))
    assert (tier.written, tier.status()["records"]) == (7, 7)
    tier.close()


@pytest.mark.parametrize("bytes_per_token", [106, 890])
def test_a_token_takes_little_more_than_its_entries(bytes_per_token: int, directory: Directory) -> None:
    """All files, the index included: at most 1.03 of the entries' bytes, at the shipped and at released sizes."""
    directory.segment_bytes = 8 << 20
    count = 40_000_000 // (bytes_per_token * BLOCK_TOKENS)
    tier = directory.open()
    for place in range(1, count + 1):
        assert tier.put(item(place, content=os.urandom(bytes_per_token * BLOCK_TOKENS)))
        if place % 100 == 0:
            assert tier.flush()
    tier.close()
    assert directory.nbytes <= 1.03 * bytes_per_token * BLOCK_TOKENS * count


def test_a_full_queue_drops_and_never_waits(directory: Directory) -> None:
    options = StoreOptions(max_bytes=1 << 30, min_free=0)
    is_open = threading.Event()

    class Slow(type(directory.files)):  # type: ignore[misc]
        def write(self, descriptor: int, content: bytes, offset: int) -> None:
            is_open.wait(30)
            super().write(descriptor, content, offset)

    tier = DiskTier(directory.folder, directory.namespace, options, files=Slow(), queue_bytes=10_000)
    kept = [tier.put(item(place)) for place in range(1, 50)]
    assert kept.count(True) <= 10_000 // 1500 + 1
    assert tier.dropped == kept.count(False)
    is_open.set()
    assert tier.flush()
    assert readable(tier, 50) == [place for place in range(1, 50) if kept[place - 1]]
    tier.close()


# -------------------------------------------------------------------------------------------------------- making room


def test_the_budget_is_never_exceeded_and_the_newest_chains_are_there(directory: Directory) -> None:
    directory.max_bytes, directory.segment_bytes = 2_000_000, 50_000
    tier = directory.open()
    for number in range(90):
        put(tier, range(1, 21), f"chain {number}")
        assert directory.nbytes <= directory.max_bytes
    assert readable(tier, 20, "chain 89") == list(range(1, 21))
    assert readable(tier, 20, "chain 0") == []
    assert tier.store.evicted > 0
    assert sum(len(readable(tier, 20, f"chain {number}")) for number in range(90)) * 1568 > 900_000
    assert tier.incidents.counts == {}
    assert tier.status()["retention_s"] > 0
    tier.close()


def test_leaves_go_first_and_what_is_used_stays(directory: Directory) -> None:
    directory.max_bytes, directory.segment_bytes = 1_500_000, 20_000
    tier = directory.open()
    put(tier, range(1, 201), "long")
    put(tier, range(1, 51), "used")
    for number in range(70):
        put(tier, range(1, 21), f"chain {number}")
        tier.touch([key(place, "used") for place in range(1, 51)])
        assert tier.flush()
        left = readable(tier, 200, "long")
        assert left == list(range(1, len(left) + 1))  # a block never outlives the one before it
    assert left == []
    assert readable(tier, 50, "used") == list(range(1, 51))
    tier.close()


def test_what_is_put_again_counts_as_used(directory: Directory) -> None:
    directory.max_bytes, directory.segment_bytes = 1_500_000, 20_000
    tier = directory.open()
    put(tier, range(1, 21), "again")
    for number in range(70):
        put(tier, range(1, 21), f"chain {number}")
        put(tier, range(1, 21), "again")
    assert readable(tier, 20, "again") == list(range(1, 21))
    assert tier.written == 71 * 20
    tier.close()


def test_a_sparse_segment_is_copied_forward_and_freed(directory: Directory) -> None:
    directory.segment_bytes = 10 * 1568
    tier = directory.open()
    put(tier, range(1, 41))
    before = len(directory.segments)
    tier.store.index.remove([key(place) for place in range(1, 41) if place % 4])
    used = tier.store._reclaim.excess(0) + tier.store._reclaim._limits.max_bytes
    tier.store._reclaim._limits = Limits(max_bytes=used - 20_000, min_free=0)
    put(tier, range(1, 2), "b")
    assert readable(tier, 40) == [place for place in range(1, 41) if place % 4 == 0]
    assert len(directory.segments) < before
    assert tier.store.evicted == 0
    tier.close()


def test_a_minimum_of_free_disk_is_left(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    directory.min_free = 1 << 20
    tier = directory.open()
    put(tier, range(1, 11))
    directory.files.free = (1 << 20) + 100
    put(tier, range(1, 11), "b")
    assert readable(tier, 10, "b") == []
    assert tier.incidents.counts == {"no_space": 1}
    assert len(caplog.records) == 1
    directory.files.free = None
    put(tier, range(1, 11), "b")
    assert readable(tier, 10, "b") == list(range(1, 11))
    tier.close()


# ----------------------------------------------------------------------------------------------------------- lineages


def test_lineages_are_in_segments_of_their_own(directory: Directory) -> None:
    tier = directory.open()
    for place in range(1, 6):
        assert tier.put(item(place, "exact"))
        assert tier.put(item(place, "approximate", is_approximate=True))
    assert tier.flush()
    assert readable(tier, 5, "approximate", is_approximate=True) == [1, 2, 3, 4, 5]
    assert len({row.namespace for row in tier.store.index.segments()}) == 2
    assert readable(tier, 5, "approximate") == []  # an exact request that asked for one would not get it
    assert tier.incidents.counts == {"wrong_namespace": 5}
    tier.close()


def test_an_approximate_block_has_no_content_that_its_key_gives(directory: Directory) -> None:
    tier = directory.open()
    assert tier.put(item(1, is_approximate=True))
    assert tier.put(item(1, content=payload(2), is_approximate=True))
    assert tier.flush()
    assert readable(tier, 1, is_approximate=True) == [1]
    assert tier.incidents.counts == {}
    tier.close()


def test_an_alias_reads_the_record_that_it_names(directory: Directory) -> None:
    tier = directory.open()
    put(tier, range(1, 4))
    alias = Item(
        key=key(2, "other"),
        parent=key(1, "other"),
        kind=Kind.ALIAS,
        is_approximate=True,
        num_tokens=256,
        tokens=128,
        payload=key(2),
    )
    assert tier.put(alias)
    assert tier.flush()
    place = tier.find([alias.key])[alias.key]
    assert tier.load(alias.key, place, is_approximate=True) == payload(2)
    tier.store.index.remove([key(2)])
    assert tier.load(alias.key, place, is_approximate=True) is None
    tier.close()


# ------------------------------------------------------------------------------------------------------------ sharing


def test_two_writers_share_a_directory(directory: Directory) -> None:
    first, second = directory.open(), directory.open()
    threads = [
        threading.Thread(target=put, args=(first, range(1, 120), "a")),
        threading.Thread(target=put, args=(second, range(1, 120), "b")),
        threading.Thread(target=put, args=(second, range(1, 120), "a")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tier in (first, second):
        assert readable(tier, 120, "a") == readable(tier, 120, "b") == list(range(1, 120))
        assert tier.incidents.counts == {}
    first.close()
    third = directory.open()
    assert readable(third, 120, "b") == list(range(1, 120))
    assert third.incidents.counts == {}
    third.close()
    second.close()


def test_an_index_that_another_keeps_locked_costs_entries_only(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index, "_BUSY_MS", 50)
    tier = directory.open()
    put(tier, range(1, 4))
    other = sqlite3.connect(directory.folder / index.INDEX_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    put(tier, range(4, 7))
    assert readable(tier, 6) == [1, 2, 3]
    other.execute("ROLLBACK")
    other.close()
    put(tier, range(5, 7))
    assert readable(tier, 6) == [1, 2, 3, 5, 6]
    assert set(tier.incidents.counts) == {"index_busy"}
    assert len(caplog.records) == 1
    tier.close()
    tier = directory.open()
    assert readable(tier, 6) == [1, 2, 3, 5, 6]
    tier.close()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY, sqlite3.SQLITE_BUSY_SNAPSHOT])
def test_every_way_of_being_locked_out_passes(directory: Directory, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = directory.open()
    problem = sqlite3.OperationalError("database is locked")
    problem.sqlite_errorcode = code

    def locked(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(tier.store.index, "add", locked)
        put(tier, range(1, 4))
    put(tier, range(4, 7))
    assert readable(tier, 6) == [4, 5, 6]
    assert set(tier.incidents.counts) == {"index_busy"}
    tier.close()


def test_any_thread_may_ask_what_is_being_written(directory: Directory) -> None:
    """A reader that misses a file asks, while the writer begins and ends segments."""
    directory.segment_bytes = 2000
    tier = directory.open()
    before, problems = sys.getswitchinterval(), list[RuntimeError]()
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                tier.store.is_open("some")
            except RuntimeError as problem:
                problems.append(problem)
                return

    asking = threading.Thread(target=ask)
    sys.setswitchinterval(1e-6)
    try:
        asking.start()
        until, place = time.monotonic() + 0.5, 0
        while time.monotonic() < until and not problems:
            place += 1
            put(tier, range(place, place + 1))
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        asking.join()
        tier.close()
    assert not problems


def test_one_makes_room_while_the_other_reads(directory: Directory) -> None:
    directory.max_bytes, directory.segment_bytes = 2_000_000, 30_000
    first, second = directory.open(), directory.open()
    put(first, range(1, 51), "old")
    assert readable(second, 50, "old") == list(range(1, 51))
    for number in range(60):
        put(first, range(1, 21), f"chain {number}")
        readable(second, 50, "old")
        put(second, range(1, 6), f"other {number}")
    assert readable(second, 50, "old") == []
    assert readable(first, 5, "other 59") == [1, 2, 3, 4, 5]
    assert second.incidents.counts == first.incidents.counts == {}
    assert directory.nbytes <= 1.2 * directory.max_bytes
    first.close()
    second.close()


def test_a_cleared_directory_has_nothing_of_its_namespace_and_all_of_others(tmp_path: Path) -> None:
    mine, other = (Directory(tmp_path / "cache", namespace={"weights": name}) for name in ("mine", "other"))
    other.fill(5, "o")
    mine.fill(9)
    neighbour = mine.open()  # another process of the same model, in the middle of a file
    put(neighbour, range(1, 4), "n")
    tier = mine.open()
    put(tier, range(1, 6), "b")
    assert tier.put(item(6, "b", is_approximate=True))
    tier.touch([key(1)])
    assert tier.clear()
    assert [readable(tier, 9, chain) for chain in "abn"] == [[], [], []]
    assert tier.status()["queued"] == 0
    put(tier, range(1, 4), "b")
    put(neighbour, range(4, 6), "n")
    assert readable(tier, 3, "b") == [1, 2, 3]
    assert readable(tier, 5, "n") == [4, 5]
    assert (tier.incidents.counts, neighbour.incidents.counts) == ({}, {})
    tier.close()
    neighbour.close()
    again = mine.open()
    assert [readable(again, 9, chain) for chain in "abn"] == [[], [1, 2, 3], [4, 5]]
    assert again.incidents.counts == {}
    again.close()
    kept = other.open()
    assert readable(kept, 5, "o") == [1, 2, 3, 4, 5]
    kept.close()


def test_a_directory_that_can_only_be_read_is_not_cleared(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "cache")
    directory.fill(9)
    directory.files.errors = {"create": errno.EROFS}
    tier = directory.open()
    assert not tier.clear()
    assert readable(tier, 9) == list(range(1, 10))
    tier.close()
