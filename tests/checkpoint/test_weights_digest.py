"""The digest of weights follows their content, not their files."""

import json
from pathlib import Path

import pytest

from headrace.checkpoint.catalog import INDEX_NAME, SINGLE_NAME
from headrace.checkpoint.weights_digest import weights_digest
from headrace.core.errors import CheckpointError
from tests.checkpoint.files import DATA, TABLE, entry, write_file


def single(folder: Path, data: bytes = DATA) -> Path:
    folder.mkdir()
    write_file(folder / SINGLE_NAME, TABLE, data)
    return folder


def test_every_tensor_counts(tmp_path: Path) -> None:
    digests = {weights_digest(single(tmp_path / "whole"))}
    for place in (0, 23, 24, 35):
        changed = bytearray(DATA)
        changed[place] ^= 1
        digests.add(weights_digest(single(tmp_path / f"changed{place}", bytes(changed))))
    assert len(digests) == 5


def test_a_large_tensor_can_be_looked_at_in_many_places(tmp_path: Path) -> None:
    table = {"rows": entry("I8", [4096], 0, 4096)}
    digests: set[str] = set()
    for place in (None, 0, 2048, 3900):
        data = bytearray(4096)
        if place is not None:
            data[place] = 1
        folder = tmp_path / f"{place}"
        folder.mkdir()
        write_file(folder / SINGLE_NAME, table, bytes(data))
        digests.add(weights_digest(folder, spread=True))
    assert len(digests) == 4


def test_files_and_their_names_do_not_count(tmp_path: Path) -> None:
    whole, cut = single(tmp_path / "whole"), tmp_path / "cut"
    cut.mkdir()
    write_file(cut / "x1.safetensors", {"a": entry("F32", [2, 3], 0, 24)}, DATA[:24])
    rest = {
        "b": entry("BF16", [4], 0, 8),
        "empty": entry("I8", [0, 5], 8, 8),
        "scalar": entry("F32", [], 8, 12),
    }
    write_file(cut / "x2.safetensors", rest, DATA[24:])
    names = {"a": "x1.safetensors", **dict.fromkeys(rest, "x2.safetensors")}
    (cut / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": names}))
    assert weights_digest(cut) == weights_digest(whole)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        weights_digest(tmp_path)
