import json
import struct
from pathlib import Path

import pytest

from headrace.checkpoint.catalog import INDEX_NAME, open_catalog, read_header
from headrace.core.errors import CheckpointError
from tests.checkpoint.files import DATA, TABLE, entry, header_bytes, write_file
from tests.golden_mini import FOLDER

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_good_file_gives_every_tensor_with_its_place(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", TABLE, DATA)
    catalog = open_catalog(tmp_path)
    assert set(catalog.tensors) == set(TABLE)
    assert catalog.total_bytes == 36
    b = catalog.tensors["b"]
    assert (b.shape, b.dtype, b.nbytes, b.file) == ((4,), "BF16", 8, file)
    assert file.read_bytes()[b.offset : b.offset + b.nbytes] == DATA[24:32]
    assert open_catalog(file).tensors == catalog.tensors


def test_the_golden_checkpoint_is_read() -> None:
    catalog = open_catalog(FOLDER)
    assert len(catalog.tensors) == 962
    assert catalog.total_bytes == 10_512_226


@pytest.mark.parametrize("missing", [1, 4, 35, 36])
def test_a_file_short_by_any_number_of_bytes_is_refused_naming_them(tmp_path: Path, missing: int) -> None:
    whole = header_bytes(TABLE) + DATA
    file = tmp_path / "model.safetensors"
    file.write_bytes(whole[:-missing])
    with pytest.raises(CheckpointError) as caught:
        open_catalog(tmp_path)
    for word in (str(file), str(len(whole)), str(len(whole) - missing), f"{missing} bytes are missing"):
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes"),
        (b"\x01\x00\x00", "3 bytes"),
        (struct.pack("<Q", 50) + b"{}", "48 bytes are missing"),
        (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{,", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "UTF-8"),
        (header_bytes(TABLE) + DATA + b"x", "1 bytes are too many"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "overlaps"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, "gap"),
        ({"a": entry("F32", [2], 4, 12)}, "gap"),
        ({"a": entry("F32", [2], 0, 4)}, r"4 bytes of data; shape \[2\] of F32 takes 8"),
        ({"a": entry("F32", [2], 8, 0)}, "data_offsets"),
        ({"a": entry("F32", [-2], 0, 8)}, "shape"),
        ({"a": entry("F32", [True], 0, 4)}, "shape"),
        ({"a": entry("F32", [2**40, 2**40], 0, 8)}, "takes"),
        ({"a": entry("F4", [2], 0, 8)}, "'F4'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "exactly"),
        ({"a": 3}, "exactly"),
        ({"__metadata__": {"a": 3}}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, table: dict, words: str) -> None:
    file = write_file(tmp_path / "model.safetensors", table, bytes(20))
    with pytest.raises(CheckpointError, match=words):
        read_header(file)


def test_a_tensor_named_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("I8", [1], 0, 1))
    text = f'{{"a": {one}, "a": {one}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
    with pytest.raises(CheckpointError, match="'a' stands twice"):
        open_catalog(tmp_path)


def write_sharded(folder: Path, *, total: int | None = 36, **weight_map: str) -> None:
    write_file(folder / SHARDS[0], {"a": TABLE["a"]}, DATA[:24])
    write_file(folder / SHARDS[1], {"b": entry("BF16", [4], 0, 8), "c": entry("I8", [4], 8, 12)}, DATA[24:])
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]} | weight_map}
    if total is not None:
        index["metadata"] = {"total_size": total}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    catalog = open_catalog(tmp_path)
    assert {name: entry.file.name for name, entry in catalog.tensors.items()} == {
        "a": SHARDS[0],
        "b": SHARDS[1],
        "c": SHARDS[1],
    }
    write_sharded(tmp_path, total=None)
    assert open_catalog(tmp_path).total_bytes == 36


def test_an_index_and_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, total=35)
    with pytest.raises(CheckpointError, match=r"total_size 35; .* take 36"):
        open_catalog(tmp_path)
    write_sharded(tmp_path, d=SHARDS[0])
    with pytest.raises(CheckpointError, match=f"tensor d in shard {SHARDS[0]}"):
        open_catalog(tmp_path)
    write_sharded(tmp_path, a=SHARDS[1])
    with pytest.raises(CheckpointError, match=f"tensor a in shard {SHARDS[1]}"):
        open_catalog(tmp_path)
    write_sharded(tmp_path)
    write_file(tmp_path / SHARDS[0], {"a": TABLE["a"], "x": entry("I8", [1], 24, 25)}, DATA[:25])
    with pytest.raises(CheckpointError, match=f"tensor x stands in shard {SHARDS[0]} but not in"):
        open_catalog(tmp_path)
    write_file(tmp_path / SHARDS[0], {"b": TABLE["a"]}, DATA[:24])
    with pytest.raises(CheckpointError, match="tensor b stands in two shards"):
        open_catalog(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"shard {SHARDS[1]}, named by .*, is missing"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "", ".."])
def test_an_index_reaches_no_file_outside_its_folder(tmp_path: Path, place: str) -> None:
    write_sharded(tmp_path, a=place)
    with pytest.raises(CheckpointError, match="a file name in that folder"):
        open_catalog(tmp_path)


def test_folders_without_one_clear_set_of_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        open_catalog(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_catalog(tmp_path / "nowhere")
    write_sharded(tmp_path)
    write_file(tmp_path / "model.safetensors", TABLE, DATA)
    with pytest.raises(CheckpointError, match="holds both"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        open_catalog(tmp_path)
