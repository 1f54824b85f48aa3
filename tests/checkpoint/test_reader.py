from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint.catalog import TensorEntry, open_catalog
from headrace.checkpoint.reader import map_rows, read_tensor, tensor_bytes
from headrace.checkpoint.stream import pieces, read_into
from headrace.core.errors import CheckpointError
from headrace.core.formats import FORMATS
from tests.checkpoint.files import DATA, TABLE, write_file
from tests.golden_mini import FOLDER


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_as_the_safetensors_library_reads_it(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 256 if name != "BOOL" else 2, (6 * FORMATS[name].num_bytes,), dtype=torch.uint8)
    tensor = raw.view(FORMATS[name].torch_dtype).reshape(2, 3)
    save_file({"x": tensor, "y": torch.ones(3)}, tmp_path / "model.safetensors")
    got = read_tensor(open_catalog(tmp_path).tensors["x"])
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_the_golden_checkpoint_is_read_bit_for_bit() -> None:
    expected = load_file(FOLDER / "model.safetensors")
    for name, entry in open_catalog(FOLDER).tensors.items():
        got = read_tensor(entry)
        assert got.dtype == expected[name].dtype, name
        assert got.shape == expected[name].shape, name
        assert got.reshape(-1).view(torch.uint8).equal(expected[name].reshape(-1).view(torch.uint8)), name


def test_tensors_without_elements_or_axes_are_read(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", TABLE, DATA)
    tensors = open_catalog(tmp_path).tensors
    assert read_tensor(tensors["empty"]).shape == (0, 5)
    assert read_tensor(tensors["scalar"]).shape == ()
    assert list(pieces(tensors["empty"])) == []


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", TABLE, DATA)
    entry = open_catalog(tmp_path).tensors["b"]
    file.write_bytes(file.read_bytes()[: entry.offset + 3])
    with pytest.raises(CheckpointError, match=r"ended while tensor b was read: 5 of its 8 bytes are missing"):
        read_tensor(entry)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read tensor b"):
        read_tensor(entry)
    with pytest.raises(CheckpointError, match="cannot map tensor m"):
        map_rows(TensorEntry("m", (10, 10), "I8", file, 8, 100))


@pytest.mark.parametrize("piece_bytes", [1, 5, 8, 24, 100])
def test_pieces_join_to_the_tensor(tmp_path: Path, piece_bytes: int) -> None:
    write_file(tmp_path / "model.safetensors", TABLE, DATA)
    entry = open_catalog(tmp_path).tensors["a"]
    got = [piece.tobytes() for piece in pieces(entry, piece_bytes)]
    assert b"".join(got) == DATA[:24]
    assert max(map(len, got)) <= piece_bytes
    part = np.zeros(5, dtype=np.uint8)
    read_into(entry, part, start=7)
    assert part.tobytes() == DATA[7:12]


def test_rows_are_mapped_read_only_and_unread(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", TABLE, DATA)
    tensors = open_catalog(tmp_path).tensors
    rows = map_rows(tensors["a"])
    assert rows.shape == (2, 12)
    assert rows[1].tobytes() == DATA[12:24]
    assert not rows.flags.writeable
    with pytest.raises(CheckpointError, match="only a matrix"):
        map_rows(tensors["b"])
    with pytest.raises(CheckpointError, match="only a matrix"):
        map_rows(tensors["empty"])


def test_the_bytes_of_a_tensor_are_those_of_a_file() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert b"".join(part.tobytes() for part in tensor_bytes(tensor.T)) == tensor.T.contiguous().numpy().tobytes()
    assert b"".join(part.tobytes() for part in tensor_bytes(torch.tensor(1.0))) == b"\x00\x00\x80\x3f"
