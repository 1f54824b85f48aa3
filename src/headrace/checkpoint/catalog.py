"""What a checkpoint folder holds, known from the headers of its files alone.

Every header is checked before anything is read from behind it: a file that is short by one byte, overlapping tensors,
an index that disagrees with its shards. Weights are never touched, torch is never loaded. Read `reader.py` next.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec
from headrace.core.strict_json import parse_json, read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
_MAX_INDEX_BYTES = 256 * 2**20
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `offset` counts bytes from the start of `file`; `dtype` is a safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int

    @property
    def spec(self) -> TensorSpec:
        """Name, shape and format, without the place."""
        return TensorSpec(self.name, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All tensors of a checkpoint, by name. Built by `open_catalog`; holds no open files."""

    path: Path
    tensors: Mapping[str, TensorEntry]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(entry.nbytes for entry in self.tensors.values())


def open_catalog(path: Path | str) -> Catalog:
    """Read and check every header of a checkpoint.

    Args:
        path: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the shards it names; or one
            safetensors file.

    Raises:
        CheckpointError: a file is missing, shorter or longer than its header says, or its header is not valid; or the
            index and the shards disagree.
    """
    path = Path(path)
    if path.is_file():
        return Catalog(path, read_header(path))
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder is accepted.")
    if (path / INDEX_NAME).is_file():
        return Catalog(path, _read_sharded(path))
    if (path / SINGLE_NAME).is_file():
        return Catalog(path, read_header(path / SINGLE_NAME))
    raise CheckpointError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}, so it has no weights.")


def _read_sharded(folder: Path) -> dict[str, TensorEntry]:
    index_path = folder / INDEX_NAME
    weight_map, total_size = _read_index(index_path)
    shards: dict[str, None] = dict.fromkeys(weight_map.values())
    if SINGLE_NAME not in shards and (folder / SINGLE_NAME).exists():
        raise CheckpointError(f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, which does not name it.")
    for shard in shards:
        if not (folder / shard).is_file():
            raise CheckpointError(f"shard {shard}, named by {index_path}, is missing from {folder}.")
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} stands in two shards: {tensors[name].file.name} and {shard}.")
            if name not in weight_map:
                raise CheckpointError(f"tensor {name} stands in shard {shard} but not in {index_path}.")
            tensors[name] = entry
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{index_path} places tensor {name} in shard {shard}, which does not hold it.")
    held = sum(entry.nbytes for entry in tensors.values())
    if total_size is not None and total_size != held:
        raise CheckpointError(
            f"{index_path} has metadata.total_size {total_size}; the tensors of its shards take {held} bytes."
        )
    return tensors


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    document = read_json(path, max_bytes=_MAX_INDEX_BYTES, error=CheckpointError)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map that places tensors in shards.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != Path(shard).name or shard in {"", ".", ".."}:
            raise CheckpointError(f"{path} places tensor {name} in {shard!r}; a file name in that folder is accepted.")
    metadata = document.get("metadata", {})
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total_size is not None and (not isinstance(total_size, int) or isinstance(total_size, bool)):
        raise CheckpointError(f"{path} has metadata.total_size {total_size!r}; a whole number of bytes is accepted.")
    return weight_map, total_size


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file cannot be read, its header is not valid, or its size is not what the header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, size, file.read(_LENGTH_BYTES))
            text = file.read(length)
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}.") from None
    header = parse_json(text, f"the header of {path}", CheckpointError)
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {path} is not a JSON object.")
    _check_metadata(path, header.pop("__metadata__", {}))
    start = _LENGTH_BYTES + length
    tensors = {name: _entry(path, name, value, start) for name, value in header.items()}
    _check_layout(path, tensors, start, size)
    return tensors


def _header_length(path: Path, size: int, head: bytes) -> int:
    if len(head) < _LENGTH_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, fewer than the {_LENGTH_BYTES} that give its header's length.")
    (length,) = struct.unpack("<Q", head)
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} claims a header of {length} bytes; at most {_MAX_HEADER_BYTES} are accepted, so this is not a "
            "safetensors file."
        )
    if _LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path} has {size} bytes but its header alone should take {_LENGTH_BYTES + length}: "
            f"{_LENGTH_BYTES + length - size} bytes are missing."
        )
    return int(length)


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"the header of {path} has a __metadata__ that is not a map of strings.")


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    where = f"tensor {name} in {path}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is not described by exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise CheckpointError(f"{where} has dtype {dtype!r}; {', '.join(FORMATS)} are accepted.")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        shown = repr(shape)[:80]
        raise CheckpointError(
            f"{where} has shape {shown}; a list of up to {_MAX_DIMENSIONS} whole numbers is accepted."
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}; a start and an end are accepted.")
    spec = TensorSpec(name, tuple(shape), dtype)
    begin, end = offsets
    if end - begin != spec.num_bytes:
        raise CheckpointError(
            f"{where} has {end - begin} bytes of data; shape {shape} of {dtype} takes {spec.num_bytes}."
        )
    return TensorEntry(name, spec.shape, dtype, path, start + begin, end - begin)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values
    )


def _check_layout(path: Path, tensors: Mapping[str, TensorEntry], start: int, size: int) -> None:
    position = start
    for entry in sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            what = "overlaps the tensor before it" if entry.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"tensor {entry.name} in {path} starts at byte {entry.offset - start} of the data and {what}, which "
                f"ends at byte {position - start}."
            )
        position += entry.nbytes
    if position != size:
        missing = f"{position - size} bytes are missing" if position > size else f"{size - position} bytes are too many"
        raise CheckpointError(f"{path} has {size} bytes; its header calls for {position}: {missing}.")
