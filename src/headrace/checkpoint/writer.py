"""Write checkpoint files in the safetensors format: headers known up front, data streamed behind them.

Nothing that looks like a checkpoint exists before every byte of it is on disk: files are written under temporary names,
synced, and renamed at the end, the index last. Whatever goes wrong, no partial file is left behind.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.catalog import INDEX_NAME, SINGLE_NAME
from headrace.core.errors import CapacityError, InternalError, UserError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec

DEFAULT_SHARD_BYTES = 4 * 2**30
_PARTIAL = ".partial"

Source = Callable[[TensorSpec], Iterable[NDArray[np.uint8]]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file to write: its final name and its tensors in file order."""

    name: str
    specs: tuple[TensorSpec, ...]


def new_folder(folder: Path) -> bool:
    """Make sure that `folder` is an empty, writable folder.

    Returns:
        Whether it had to be made.

    Raises:
        UserError: it is not a folder, is not empty, or cannot be made or written to.
    """
    existed = folder.is_dir()
    try:
        if existed and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; a new or empty folder is accepted.", param="out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"cannot make the folder {folder}: {problem.strerror or problem}.", param="out") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"the folder {folder} cannot be written to; a writable folder is accepted.", param="out")
    return not existed


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[None]:
    """Run the writing of a new checkpoint folder; remove everything in it if that fails.

    Raises:
        UserError: see `new_folder`; or a file could not be written.
        CapacityError: the disk is full.
    """
    made = new_folder(folder)
    try:
        yield
    except BaseException as problem:
        for path in folder.iterdir():
            path.unlink()
        if made:
            folder.rmdir()
        if isinstance(problem, OSError):
            raise _write_error(folder, problem) from None
        raise


def _write_error(path: Path, problem: OSError) -> UserError:
    if problem.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CapacityError(f"the disk is full: {path} could not be written, and what had been written was removed.")
    return UserError(f"cannot write {path}: {problem.strerror or problem}.")


def write_tensors(
    folder: Path,
    specs: Iterable[TensorSpec],
    source: Source,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as one safetensors file, or as shards with an index.

    Call it inside `whole_or_nothing`, which cleans up after a failure.

    Args:
        folder: where; nothing in it is replaced.
        specs: what, in any order; every name once.
        source: gives a tensor's bytes in pieces; called once per tensor, in file order.
        max_shard_bytes: data per file; a larger tensor gets a file of its own.
        metadata: strings for the header of every file.

    Raises:
        CapacityError: the free space of the disk is too small.
        InternalError: a name stands twice, or `source` gave more or fewer bytes than the tensor has.
        OSError: writing failed.
    """
    shards = _plan(list(specs), max_shard_bytes)
    needed = sum(spec.num_bytes for shard in shards for spec in shard.specs)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(
            f"writing {folder} needs {needed:,} bytes and the disk has {free:,} bytes free.", param="out"
        )
    for shard in shards:
        _write_shard(folder / f"{shard.name}{_PARTIAL}", shard, source, metadata or {"format": "pt"})
    for shard in shards:
        (folder / f"{shard.name}{_PARTIAL}").rename(folder / shard.name)
    if len(shards) > 1:
        weight_map = {spec.name: shard.name for shard in shards for spec in shard.specs}
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": needed}, "weight_map": weight_map})


def write_json(path: Path, document: Any) -> None:
    """Write one JSON file so that it is there whole or not at all."""
    write_bytes(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write one small file so that it is there whole or not at all."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("xb") as file:
        file.write(data)
        _sync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _sync(folder)
    finally:
        os.close(folder)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in {errno.EINVAL, errno.EROFS}:  # a file system that knows no sync
            raise


def _plan(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[_Shard]:
    if len({spec.name for spec in specs}) != len(specs):
        raise InternalError("a tensor name stands twice in the list of tensors to write")
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.num_bytes
    names = [SINGLE_NAME]
    if len(groups) > 1:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    # wider formats first, so that every tensor starts at a multiple of its element size
    return [
        _Shard(name, tuple(sorted(group, key=lambda spec: -FORMATS[spec.dtype].num_bytes)))
        for name, group in zip(names, groups, strict=True)
    ]


def _header(shard: _Shard, metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in shard.specs:
        end = offset + spec.num_bytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_shard(path: Path, shard: _Shard, source: Source, metadata: Mapping[str, str]) -> None:
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(_header(shard, metadata)))
        for spec in shard.specs:
            written = 0
            for piece in source(spec):
                view = piece.data.cast("B")
                _write_all(file.fileno(), view)
                written += len(view)
            if written != spec.num_bytes:
                raise InternalError(f"tensor {spec.name} takes {spec.num_bytes} bytes, its source gave {written}")
        _sync(file.fileno())


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])
