"""The folder of a run: whole checkpoints or none, one writer, and refusals that name the file."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.writer import NewCheckpoint
from headrace.core.errors import CapacityError, UserError
from headrace.train import save
from headrace.train.save import RunFolder, Snapshot, read_state


def snapshot(step: int) -> Snapshot:
    """Return a state with tensors of several dtypes."""
    tensors = {
        "master/a.weight": torch.full((3, 5), float(step)),
        "optimizer/a.weight/adamw.step": torch.tensor(step),
        "routes/0/3": torch.arange(9, dtype=torch.uint8),
    }
    return Snapshot(step, tensors, {"tokens": 7 * step, "stream": {"pool": [[1, 2, 3]]}})


def export(folder: Path) -> None:
    """Stand for the writer of the official format."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")


def flip_byte(file: Path, place: int) -> None:
    """Change one byte of a file."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def run_folder(path: Path, *, is_resumed: bool = False) -> RunFolder:
    """Open and at once release a run's folder, so that the next one can be opened."""
    folder = RunFolder(path, is_resumed=is_resumed)
    folder.close()
    return folder


def test_a_saved_state_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    checkpoint = folder.save(snapshot(12), export)
    assert checkpoint.name == "step-00000012"
    found, wanted = folder.load(), snapshot(12)
    assert (found.step, found.plain) == (wanted.step, wanted.plain)
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in wanted.tensors.items())
    assert all(found.tensors[name].dtype == value.dtype for name, value in wanted.tensors.items())


def test_older_checkpoints_go_once_a_newer_one_is_whole(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for step in (2, 4, 6):
        folder.save(snapshot(step), export, keep=2)
    assert [path.name for path in folder.checkpoints()] == ["step-00000004", "step-00000006"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000004", "step-00000006"]


def test_the_same_step_is_not_written_twice(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    first = folder.save(snapshot(2), export)
    stamp = (first / "resume" / "state.json").stat().st_mtime_ns
    assert folder.save(snapshot(2), export) == first
    assert (first / "resume" / "state.json").stat().st_mtime_ns == stamp


def full_disk(after: int) -> Callable[..., int]:
    """Return a stand-in for `os.write` that accepts so many bytes and then says the disk is full."""
    left = after
    real = os.write

    def write(descriptor: int, data: memoryview | bytes) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, bytes(data)[:left])
        left -= written
        return written

    return write


@pytest.mark.parametrize("after", [0, 60, 200])
def test_a_full_disk_leaves_the_last_good_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder = run_folder(tmp_path)
    good = folder.save(snapshot(2), export)
    monkeypatch.setattr(os, "write", full_disk(after))
    with pytest.raises(CapacityError, match="disk is full"):
        folder.save(snapshot(4), export)
    monkeypatch.undo()
    assert folder.checkpoints() == [good]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", good.name]
    assert folder.load().step == 2


def test_a_full_disk_for_the_last_file_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = run_folder(tmp_path)
    monkeypatch.setattr(NewCheckpoint, "write_json", no_room)
    with pytest.raises(CapacityError, match="disk is full"):
        folder.save(snapshot(4), export)
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_a_full_disk_while_weights_are_exported_is_a_sentence_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)

    def no_room(out: Path) -> None:
        out.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CapacityError, match=r"disk is full: .*step-00000003"):
        folder.save(snapshot(3), no_room)
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_a_death_while_writing_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path)
    folder.save(snapshot(2), export)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "_write_state", die)
    monkeypatch.setattr(save.shutil, "rmtree", lambda *_args, **_options: None)  # a killed process cleans nothing up
    with pytest.raises(KeyboardInterrupt):
        folder.save(snapshot(4), export)
    monkeypatch.undo()
    assert any(path.name.startswith(".unfinished") for path in tmp_path.iterdir())
    again = run_folder(tmp_path, is_resumed=True)
    assert again.load().step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000002"]


@pytest.mark.parametrize("name", ["resume/model.safetensors", "resume/state.json", "model.safetensors"])
def test_a_changed_byte_is_refused_with_the_name_of_the_file(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path)
    file = folder.save(snapshot(2), export) / name
    flip_byte(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=name) as refused:
        folder.load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["resume/model.safetensors", "resume/state.json", "model.safetensors"])
def test_a_file_that_is_short_or_gone_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path)
    file = folder.save(snapshot(2), export) / name
    data = file.read_bytes()
    file.write_bytes(data[:-2])
    with pytest.raises(UserError, match=name):
        folder.load()
    file.unlink()
    with pytest.raises(UserError, match=name):
        folder.load()


def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    checkpoint = run_folder(tmp_path).save(snapshot(2), export)
    path = checkpoint / "resume" / "state.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    document["format"] = 99
    path.write_text(json.dumps({**document, "checksum": save._document_checksum(document)}))
    with pytest.raises(UserError, match="format 99"):
        read_state(checkpoint)


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, is_resumed=False)
    with pytest.raises(UserError, match="another run"):
        RunFolder(tmp_path, is_resumed=False)
    first.close()
    run_folder(tmp_path)


def test_a_new_run_refuses_a_folder_with_a_run_or_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"photo\.png"):
        run_folder(tmp_path)
    (tmp_path / "photo.png").unlink()
    run_folder(tmp_path).save(snapshot(2), export)
    with pytest.raises(UserError, match="--resume"):
        run_folder(tmp_path)


def test_resuming_where_nothing_was_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        run_folder(tmp_path, is_resumed=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write"):
        run_folder(tmp_path / "file" / "run")
