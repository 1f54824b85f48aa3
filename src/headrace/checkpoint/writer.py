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
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class NewCheckpoint:
    """A checkpoint folder that is being written; made by `new_checkpoint`.

    Owns the files it made, and nothing else in the folder: only those are removed if the work fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; a new or empty folder is accepted.", param="out")
        try:
            self._made_folder = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UserError(f"{folder} is not empty; a new or empty folder is accepted.", param="out")
        except OSError as problem:
            raise UserError(f"cannot make the folder {folder}: {problem.strerror or problem}.", param="out") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"the folder {folder} cannot be written to; a writable folder is accepted.", param="out")

    def write_tensors(
        self, specs: Iterable[TensorSpec], source: Source, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        """Write tensors as one safetensors file, or as shards with an index.

        Args:
            specs: what, in any order; every name once.
            source: gives a tensor's bytes in pieces; called once per tensor, in file order.
            max_shard_bytes: data per file; a larger tensor gets a file of its own.

        Raises:
            CapacityError: the free space of the disk is too small.
            InternalError: a name stands twice, or `source` gave more or fewer bytes than the tensor has.
            OSError: writing failed.
        """
        shards = _plan(list(specs), max_shard_bytes)
        needed = sum(spec.num_bytes for shard in shards for spec in shard.specs)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise CapacityError(
                f"writing {self._folder} needs {needed:,} bytes and the disk has {free:,} bytes free.", param="out"
            )
        partials = [self._register(f"{shard.name}{_PARTIAL}") for shard in shards]
        for partial, shard in zip(partials, shards, strict=True):
            _write_shard(partial, shard, source)
        for partial, shard in zip(partials, shards, strict=True):
            partial.rename(self._register(shard.name))
        if len(shards) > 1:
            weight_map = {spec.name: shard.name for shard in shards for spec in shard.specs}
            self.write_json(INDEX_NAME, {"metadata": {"total_size": needed}, "weight_map": weight_map})

    def write_json(self, name: str, document: Any) -> None:
        """Write one JSON file so that it is there whole or not at all; `config.json` should come last of all."""
        self.write_bytes(name, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write one small file so that it is there whole or not at all."""
        partial = self._register(f"{name}{_PARTIAL}")
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            _sync(file.fileno())
        partial.rename(self._register(name))
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            _sync(folder)
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Remove every file that was made, and the folder if it was made too."""
        for path in self._made:
            path.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # somebody else put something there
                self._folder.rmdir()

    def _register(self, name: str) -> Path:
        path = self._folder / name
        if path.exists():
            raise FileExistsError(errno.EEXIST, f"{path} appeared while the folder was being written")
        self._made.append(path)
        return path


@contextlib.contextmanager
def new_checkpoint(folder: Path) -> Iterator[NewCheckpoint]:
    """Write a new checkpoint folder: whole, or not at all.

    Args:
        folder: a folder that does not exist or is empty.

    Raises:
        UserError: it is not a folder, is not empty, cannot be made or written to; or a file could not be written.
        CapacityError: the disk is full.
    """
    checkpoint = NewCheckpoint(folder)
    try:
        yield checkpoint
    except BaseException as problem:
        checkpoint.remove()
        if isinstance(problem, OSError):
            raise _write_error(folder, problem) from None
        raise


def _write_error(path: Path, problem: OSError) -> UserError:
    if problem.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CapacityError(f"the disk is full: {path} could not be written, and what had been written was removed.")
    return UserError(f"cannot write {path}: {problem.strerror or problem}.")


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


def _header(shard: _Shard) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in shard.specs:
        end = offset + spec.num_bytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_shard(path: Path, shard: _Shard, source: Source) -> None:
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(_header(shard)))
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
