import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from headrace.checkpoint.catalog import INDEX_NAME, open_catalog
from headrace.checkpoint.stream import pieces
from headrace.checkpoint.writer import new_checkpoint
from headrace.core.errors import CapacityError, InternalError, UserError
from headrace.core.spec import TensorSpec

SPECS = [
    TensorSpec("bytes", (3,), "I8"),
    TensorSpec("wide", (5,), "F32"),
    TensorSpec("scales", (1, 7), "F8_E8M0"),
    TensorSpec("half", (2, 3), "BF16"),
    TensorSpec("empty", (0, 4), "BF16"),
    TensorSpec("one", (), "F32"),
]


def data_of(spec: TensorSpec) -> bytes:
    return bytes((len(spec.name) + 7 * index) % 250 for index in range(spec.num_bytes))


def in_pieces(spec: TensorSpec) -> Iterator[np.ndarray]:
    data = np.frombuffer(data_of(spec), dtype=np.uint8)
    for start in range(0, len(data), 4):
        yield data[start : start + 4]


def write(folder: Path, max_shard_bytes: int = 2**30, specs: list[TensorSpec] = SPECS) -> None:
    with new_checkpoint(folder) as checkpoint:
        checkpoint.write_tensors(specs, in_pieces, max_shard_bytes=max_shard_bytes)
        checkpoint.write_json("config.json", {"é": 1})


@pytest.mark.parametrize("max_shard_bytes", [1, 12, 30, 2**30])
def test_what_is_written_is_read_back_by_us_and_by_the_safetensors_library(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    write(tmp_path / "a" / "b", max_shard_bytes)
    catalog = open_catalog(tmp_path / "a" / "b")
    assert {name: entry.spec for name, entry in catalog.tensors.items()} == {spec.name: spec for spec in SPECS}
    for spec in SPECS:
        entry = catalog.tensors[spec.name]
        assert b"".join(piece.tobytes() for piece in pieces(entry)) == data_of(spec)
        with safe_open(entry.file, "pt") as reference:
            tensor = reference.get_tensor(spec.name)
            assert tuple(tensor.shape) == spec.shape
            assert tensor.numel() * tensor.element_size() == spec.num_bytes
    assert json.loads((tmp_path / "a" / "b" / "config.json").read_text("utf-8")) == {"é": 1}


def test_shards_stay_below_their_limit_and_names_count_them(tmp_path: Path) -> None:
    write(tmp_path, 20)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    per_file: dict[str, int] = {}
    for entry in open_catalog(tmp_path).tensors.values():
        per_file[entry.file.name] = per_file.get(entry.file.name, 0) + entry.nbytes
    assert len(per_file) > 1
    assert max(per_file.values()) <= 20
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"]["total_size"] == sum(per_file.values())


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    write(tmp_path)
    widths = {"F32": 4, "BF16": 2, "I8": 1, "F8_E8M0": 1}
    for entry in open_catalog(tmp_path).tensors.values():
        assert entry.offset % widths[entry.dtype] == 0, entry.name


def failing(problem: BaseException) -> Iterator[np.ndarray]:
    yield np.zeros(2, dtype=np.uint8)
    raise problem


@pytest.mark.parametrize(
    ("problem", "raised", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError, "disk is full"),
        (OSError(errno.EIO, "Input/output error"), UserError, "Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (ValueError("odd"), ValueError, "odd"),
    ],
)
@pytest.mark.parametrize("existed", [True, False])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, problem: BaseException, raised: type[BaseException], words: str, existed: bool
) -> None:
    folder = tmp_path / "out"
    if existed:
        folder.mkdir()
    with pytest.raises(raised, match=words), new_checkpoint(folder) as checkpoint:
        checkpoint.write_bytes("tokenizer.json", b"{}")
        checkpoint.write_tensors(
            SPECS, lambda spec: failing(problem) if spec.name == "half" else in_pieces(spec), max_shard_bytes=12
        )
    assert folder.exists() == existed
    assert not existed or list(folder.iterdir()) == []


def test_files_that_others_put_into_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(UserError, match="appeared"), new_checkpoint(folder) as checkpoint:
        checkpoint.write_bytes("a.json", b"1")
        (folder / "config.json").write_text("mine")
        checkpoint.write_json("config.json", {})
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_text() == "mine"


def test_a_source_that_gives_the_wrong_number_of_bytes_is_caught(tmp_path: Path) -> None:
    short = [TensorSpec("x", (3,), "I8")]
    with pytest.raises(InternalError, match="takes 3 bytes, its source gave 2"), new_checkpoint(tmp_path) as checkpoint:
        checkpoint.write_tensors(short, lambda _: [np.zeros(2, dtype=np.uint8)])
    with pytest.raises(InternalError, match="twice"), new_checkpoint(tmp_path) as checkpoint:
        checkpoint.write_tensors(short * 2, in_pieces)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 45})())
    with pytest.raises(CapacityError, match="needs 46 bytes and the disk has 45 bytes"):
        write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_system_that_stops_a_write_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file size limit is the one way to make the kernel itself refuse a write without a disk of one's own."""
    script = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np\n"
        "from headrace.checkpoint.writer import new_checkpoint; from headrace.core.spec import TensorSpec\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "with new_checkpoint(Path(sys.argv[1])) as c:\n"
        "    c.write_tensors([TensorSpec('x', (9000,), 'I8')], lambda spec: [np.zeros(9000, dtype=np.uint8)])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "UserError: cannot write" in done.stderr
    assert not (tmp_path / "out").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


def test_folders_that_cannot_take_a_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, words in (
        (tmp_path, "not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "cannot"),
    ):
        with pytest.raises(UserError, match=words), new_checkpoint(folder):
            pass
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot"), new_checkpoint(tmp_path):
        pass
