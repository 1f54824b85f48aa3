"""Whatever happens to the files: one warning, one count, the right bytes or none, and no second try."""

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cache.tiers import store as store_module
from headrace.cache.tiers.index import INDEX_NAME
from headrace.cache.tiers.segment import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from tests.cache.tiers.faulty import PAYLOAD, Directory, item, key, payload, put, readable

COUNT = 9
RECORD = RECORD_HEADER_BYTES + PAYLOAD
ALL = list(range(1, COUNT + 1))


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    made = Directory(tmp_path / "cache")
    made.fill(COUNT)
    assert len(made.segments) == 1
    return made


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def record(place: int) -> int:
    """Where the record of a block begins."""
    return SEGMENT_HEADER_BYTES + (place - 1) * RECORD


def short_file(directory: Directory) -> None:
    os.truncate(directory.segments[0], record(6) + 700)


def flipped_payload(directory: Directory) -> None:
    flip(directory.segments[0], record(4) + RECORD_HEADER_BYTES + 33)


def flipped_header(directory: Directory) -> None:
    flip(directory.segments[0], record(4) + 20)


def flipped_segment_header(directory: Directory) -> None:
    flip(directory.segments[0], 12)


def zero_length(directory: Directory) -> None:
    os.truncate(directory.segments[0], 0)


def wrong_namespace(directory: Directory) -> None:
    """The file of a directory of other weights, in the place of ours."""
    other = Directory(directory.folder.with_name("other"), namespace={"weights": "other"})
    other.fill(COUNT)
    directory.segments[0].write_bytes(other.segments[0].read_bytes())


def index_without_payload(directory: Directory) -> None:
    directory.segments[0].unlink()


def half_written(directory: Directory) -> None:
    """A writer died in the middle of the tenth record, before it could note the ninth."""
    path = directory.segments[0]
    with path.open("ab") as file:
        file.write(path.read_bytes()[record(3) : record(3) + RECORD // 2])
    with sqlite3.connect(directory.folder / INDEX_NAME) as index:
        index.execute("UPDATE segments SET is_sealed = 0, size = ?", (record(9),))
        index.execute("DELETE FROM records WHERE key = ?", (key(9),))
    index.close()


DAMAGE: dict[str, tuple[Callable[[Directory], None], list[int]]] = {
    "short_file": (short_file, [1, 2, 3, 4, 5]),
    "bad_payload": (flipped_payload, [1, 2, 3, 5, 6, 7, 8, 9]),
    "bad_header": (flipped_header, [1, 2, 3, 5, 6, 7, 8, 9]),
    "bad_header of the file": (flipped_segment_header, []),
    "empty_file": (zero_length, []),
    "wrong_namespace": (wrong_namespace, []),
    "missing_payload": (index_without_payload, []),
    "torn_end": (half_written, ALL),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_warning_one_count_and_never_a_wrong_byte(
    name: str, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    damage, left = DAMAGE[name]
    damage(directory)
    tier = directory.open()
    assert readable(tier, COUNT) == left
    kind = name.split(" ", maxsplit=1)[0]
    counts = tier.incidents.counts
    assert set(counts) == {kind}
    assert counts[kind] == (COUNT if left == [] and kind in {"wrong_namespace", "bad_header"} else 1)
    assert len(caplog.records) == 1
    assert "computed again" in caplog.records[0].message
    # what is lost was forgotten: nobody tries again, and what is computed again is kept again
    reads = directory.files.calls["read"]
    assert readable(tier, COUNT) == left
    assert directory.files.calls["read"] - reads == len(left)
    put(tier, range(1, COUNT + 1))
    assert readable(tier, COUNT) == ALL
    tier.close()
    assert (len(caplog.records), tier.incidents.counts) == (1, counts)
    again = directory.open()
    assert readable(again, COUNT) == ALL
    again.close()


@pytest.mark.parametrize("size", [0, 10, SEGMENT_HEADER_BYTES - 1])
def test_a_writer_that_was_killed_when_it_began_a_file_left_nothing(size: int, directory: Directory) -> None:
    begun = directory.folder / "z.segment"
    begun.write_bytes(bytes(size))
    tier = directory.open()
    assert tier.incidents.counts == {"torn_end": 1}
    assert readable(tier, COUNT) == ALL
    assert not begun.exists()
    tier.close()


def test_a_payload_without_index_is_found_again(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(directory.folder / INDEX_NAME) as index:
        index.execute("DELETE FROM records")
        index.execute("DELETE FROM segments")
    index.close()
    tier = directory.open()
    assert readable(tier, COUNT) == ALL
    assert tier.incidents.counts == {"unindexed_payload": 1}
    assert len(caplog.records) == 1
    tier.close()


@pytest.mark.parametrize("how", ["noise", "cut"])
def test_an_index_that_is_none_is_built_again(how: str, directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    path = directory.folder / INDEX_NAME
    content = path.read_bytes()
    path.write_bytes(b"\x07" * len(content) if how == "noise" else content[: len(content) // 2])
    tier = directory.open()
    assert readable(tier, COUNT) == ALL
    assert set(tier.incidents.counts) == {"bad_index"}
    assert len(caplog.records) == 1
    tier.close()


def test_a_key_with_two_contents_has_none(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    tier = directory.open()
    assert tier.put(item(4, content=payload(5)))
    assert tier.flush()
    assert readable(tier, COUNT) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert tier.incidents.counts == {"conflicting_record": 1}
    assert len(caplog.records) == 1
    put(tier, range(4, 5))
    assert readable(tier, COUNT) == ALL
    tier.close()


def test_two_files_that_disagree_about_a_key_are_both_left_alone(directory: Directory) -> None:
    other = Directory(directory.folder.with_name("other"))
    tier = other.open()
    assert tier.put(item(4, content=payload(5)))
    tier.close()
    (directory.folder / "z.segment").write_bytes(other.segments[0].read_bytes())
    tier = directory.open()
    assert readable(tier, COUNT) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert tier.incidents.counts["conflicting_record"] == 1
    tier.close()


def test_a_clock_that_was_set_back_is_told_and_the_order_of_use_holds(
    directory: Directory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.time, "time_ns", lambda: 1_000_000_000_000)
    tier = directory.open()
    assert tier.incidents.counts == {"clock_set_back": 1}
    assert len(caplog.records) == 1
    put(tier, range(1, 3), "b")
    tier.store.index.evict(1)  # the older chain still goes first
    assert readable(tier, COUNT) == ALL[:-1]
    assert readable(tier, 2, "b") == [1, 2]
    assert tier.status()["retention_s"] >= 0
    tier.close()


def test_a_directory_that_can_only_be_read_is_read(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    directory.files.errors = {"create": errno.EROFS}
    tier = directory.open()
    assert readable(tier, COUNT) == ALL
    assert not tier.put(item(COUNT + 1))
    assert tier.incidents.counts == {"read_only": 1}
    assert len(caplog.records) == 1
    tier.close()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, "no_space"), (errno.EIO, "write_error")])
@pytest.mark.parametrize("can_cut", [True, False])
def test_a_write_that_fails_is_the_last_one(
    number: int, kind: str, can_cut: bool, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    tier = directory.open()
    put(tier, range(1, 4), "b")
    directory.files.errors = {"write": number} if can_cut else {"write": number, "truncate": errno.EIO}
    directory.files.grace["write"] = 2
    for place in range(4, 9):
        assert tier.put(item(place, "b")) == (place <= 6)
        assert tier.flush()
    writes = directory.files.calls["write"]
    assert tier.incidents.counts == {kind: 1}
    assert len(caplog.records) == 1
    assert not tier.put(item(9, "b"))
    assert tier.flush()
    assert directory.files.calls["write"] == writes
    assert readable(tier, 9, "b") == [1, 2, 3, 4, 5]
    assert readable(tier, COUNT) == ALL
    tier.close()
    directory.files.errors = {}
    tier = directory.open()
    assert readable(tier, 9, "b") == [1, 2, 3, 4, 5]
    put(tier, range(6, 10), "b")
    assert readable(tier, 9, "b") == list(range(1, 10))
    tier.close()


def test_a_read_that_fails_is_a_miss(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    tier = directory.open()
    directory.files.errors = {"read": errno.EIO}
    directory.files.grace["read"] = 4  # the file's header and three records
    found = tier.find([key(4)])
    assert [tier.load(key(place), tier.find([key(place)])[key(place)], is_approximate=False) for place in ALL[:3]]
    assert tier.load(key(4), found[key(4)], is_approximate=False) is None
    assert tier.incidents.counts == {"read_error": 1}
    assert len(caplog.records) == 1
    directory.files.errors = {}
    assert readable(tier, COUNT) == [1, 2, 3, 5, 6, 7, 8, 9]
    tier.close()


def test_a_file_that_is_gone_while_it_is_written_is_told_once_and_another_is_begun(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    tier = directory.open()
    put(tier, range(1, 6), "b")
    for path in directory.segments:
        path.unlink()
    tier.store._reader.close()  # what is open can still be read
    assert readable(tier, 5, "b") == []
    assert readable(tier, COUNT) == []
    assert tier.incidents.counts == {"missing_payload": 2}  # once for each file
    assert len(caplog.records) == 2
    put(tier, range(1, 6), "b")
    put(tier, range(1, COUNT + 1))
    assert readable(tier, 5, "b") == [1, 2, 3, 4, 5]
    assert readable(tier, COUNT) == ALL
    assert tier.incidents.counts == {"missing_payload": 2}
    tier.close()
    again = directory.open()
    assert readable(again, COUNT) == ALL
    assert again.incidents.counts == {}
    again.close()


def test_an_index_that_breaks_while_it_is_open_costs_cache_entries_and_the_metrics_go_on(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    tier = directory.open()
    for path in directory.folder.glob(f"{INDEX_NAME}*"):
        with path.open("r+b") as file:
            file.write(b"\x07" * path.stat().st_size)
    assert readable(tier, COUNT) == []
    assert tier.put(item(COUNT + 1))
    assert tier.flush()
    status = tier.status()
    assert (status["records"], status["is_read_only"]) == (0, 1)
    assert readable(tier, COUNT) == []
    assert tier.incidents.counts == {"bad_index": 1, "write_error": 1}
    assert len(caplog.records) == 2  # the index, and that nothing more is written
    tier.close()
    again = directory.open()
    assert readable(again, COUNT) == ALL
    assert set(again.incidents.counts) == {"bad_index"}
    again.close()


def test_an_index_without_space_is_no_space(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    tier = directory.open()
    with tier.store.index._lock:
        (pages,) = tier.store.index._db.execute("PRAGMA page_count").fetchone()
        tier.store.index._db.execute(f"PRAGMA max_page_count = {pages}")
    for place in range(COUNT + 1, COUNT + 41):
        tier.put(item(place))
        assert tier.flush()
    tier.touch([key(1)])
    assert tier.flush()
    assert tier.incidents.counts == {"no_space": 1}
    assert tier.status()["is_read_only"] == 1
    assert len(caplog.records) == 1
    assert readable(tier, COUNT) == ALL
    tier.close()
