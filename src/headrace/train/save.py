"""The folder of a run: one lock, complete checkpoints, and the state that a resumed run continues from.

    OUT/recipe.json               the recipe as it was started
    OUT/metrics.jsonl             see `progress.py`
    OUT/step-00000400/            a checkpoint in the official format, and
    OUT/step-00000400/resume/     float32 masters, optimizer state, random numbers (model.safetensors) and the place in
                                  the data, counts, checksums (state.json)

A checkpoint is written under another name, synced and renamed; only then is an older one removed. So whatever happens
while one is written, the last good one is whole.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.checkpoint.catalog import SINGLE_NAME, open_catalog
from headrace.checkpoint.reader import read_tensor, tensor_bytes
from headrace.checkpoint.writer import new_checkpoint
from headrace.core.errors import CapacityError, UserError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec
from headrace.core.strict_json import read_json

RECIPE_NAME = "recipe.json"
METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
STATE_NAME = "state.json"
_LOCK_NAME = ".lock"
_RESUME = "resume"
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = ".unfinished-"
_FORMAT = 1
_MAX_STATE_BYTES = 2**30
_DTYPE_NAMES = {entry.torch_dtype: entry.name for entry in FORMATS.values()}


@dataclass(frozen=True)
class Snapshot:
    """All state of a run after `step` steps: tensors by name, and plain values that JSON can hold."""

    step: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]


class RunFolder:
    """Owns the folder of one run while it runs; nobody else may.

    State: the lock file, and everything that is written here.
    """

    def __init__(self, path: Path, *, is_resumed: bool) -> None:
        """Make or take over the folder.

        Args:
            path: OUT.
            is_resumed: whether a run in it goes on; otherwise it must hold no checkpoint and no foreign files.

        Raises:
            UserError: the folder is in use, cannot be written, holds other things, or nothing to resume.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise UserError(f"cannot write to {path}: {problem.strerror or problem}.", param="out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"another run is writing to {path}; one at a time is accepted.", param="out") from None
        try:
            self._check(is_resumed)
        except UserError:
            self.close()
            raise
        for leftover in path.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)

    def _check(self, is_resumed: bool) -> None:
        has_checkpoint = bool(self.checkpoints())
        if is_resumed and not has_checkpoint:
            raise UserError(f"{self.path} holds no checkpoint to resume; start without --resume.", param="resume")
        if is_resumed:
            return
        if has_checkpoint:
            raise UserError(f"{self.path} holds a run; go on with --resume, or name another folder.", param="out")
        own = {RECIPE_NAME, METRICS_NAME, _LOCK_NAME, TENSORBOARD_NAME}
        foreign = sorted(
            entry.name for entry in self.path.iterdir() if entry.name not in own and _PARTIAL not in entry.name
        )
        if foreign:
            raise UserError(f"{self.path} holds {foreign[0]}; a new or empty folder is accepted.", param="out")

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._lock)

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return checkpoints_in(self.path)

    def write_json(self, name: str, document: Any) -> None:
        """Write a small file of the run, whole or not at all.

        Raises:
            UserError: it cannot be written; CapacityError where the disk is full.
        """
        partial = self.path / f"{_PARTIAL}{name}"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path / name)
        except OSError as problem:
            partial.unlink(missing_ok=True)
            raise _explain(self.path / name, problem) from None

    def save(self, snapshot: Snapshot, export: Callable[[Path], None], keep: int = 1) -> Path:
        """Write a checkpoint and remove what is older than the newest `keep`.

        Args:
            snapshot: the state to resume from.
            export: writes the checkpoint in the official format into a new folder.
            keep: complete checkpoints to keep, at least 1.

        Returns:
            Its folder; one that is there already, of the same step, is left as it is.

        Raises:
            UserError: it cannot be written; CapacityError where the disk is full. What was written of it is removed.
        """
        target = self.path / f"step-{snapshot.step:08d}"
        if target.exists():
            return target
        partial = self.path / f"{_PARTIAL}{target.name}"
        try:
            export(partial)
            _write_state(partial, snapshot)
            _sync_folder(partial)
            partial.rename(target)
            _sync_folder(self.path)
        except BaseException as problem:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(problem, OSError):
                raise _explain(target, problem) from None
            raise
        for old in [path for path in self.checkpoints() if path.name <= target.name][:-keep]:
            self._remove(old)
        return target

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: the run went back behind them."""
        for checkpoint in self.checkpoints():
            if int(checkpoint.name.removeprefix("step-")) > step:
                self._remove(checkpoint)

    def _remove(self, checkpoint: Path) -> None:
        hidden = self.path / f"{_PARTIAL}{checkpoint.name}"
        checkpoint.rename(hidden)  # a removal that is cut short must not leave half a checkpoint under its name
        shutil.rmtree(hidden)

    def load(self) -> Snapshot:
        """Read the newest checkpoint's state, checksums included.

        Raises:
            UserError: a file of it is missing, damaged or not readable.
        """
        return read_state(self.checkpoints()[-1])


def checkpoints_in(path: Path) -> list[Path]:
    """Return the complete checkpoints of the folder of a run, oldest first."""
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found)]


def _write_state(checkpoint: Path, snapshot: Snapshot) -> None:
    folder = checkpoint / _RESUME
    specs = [
        TensorSpec(name, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype]) for name, tensor in snapshot.tensors.items()
    ]
    with new_checkpoint(folder) as state:
        state.write_tensors(specs, lambda spec: tensor_bytes(snapshot.tensors[spec.name]), max_shard_bytes=2**62)
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        document = {
            "format": _FORMAT,
            "step": snapshot.step,
            "checksums": {str(path.relative_to(checkpoint)): _checksum(path) for path in files},
            "plain": snapshot.plain,
        }
        state.write_json(STATE_NAME, {**document, "checksum": _document_checksum(document)})


def read_state(checkpoint: Path) -> Snapshot:
    """Read the state of a complete checkpoint.

    Raises:
        UserError: a file is missing, damaged, of an unknown format, or not readable.
    """
    path = checkpoint / _RESUME / STATE_NAME
    document = _read_document(path)
    _check_files(checkpoint, document["checksums"])
    tensors = open_catalog(checkpoint / _RESUME / SINGLE_NAME).tensors
    return Snapshot(document["step"], {name: read_tensor(entry) for name, entry in tensors.items()}, document["plain"])


def check_exported(checkpoint: Path) -> None:
    """Hold the exported files of a checkpoint against the checksums taken when it was saved, where there are any.

    Raises:
        UserError: one is missing or was changed.
    """
    path = checkpoint / _RESUME / STATE_NAME
    if path.is_file():
        sums = _read_document(path)["checksums"]
        _check_files(checkpoint, {name: value for name, value in sums.items() if not name.startswith(f"{_RESUME}/")})


def _read_document(path: Path) -> Any:
    document = read_json(path, max_bytes=_MAX_STATE_BYTES)
    if not isinstance(document, dict) or not {"format", "step", "checksums", "plain", "checksum"} <= document.keys():
        raise _damaged(path, "a part of it is missing")
    if document.pop("checksum") != _document_checksum(document):
        raise _damaged(path, "its content does not match its checksum")
    if document["format"] != _FORMAT:
        raise UserError(f"{path} has the format {document['format']}; {_FORMAT} is accepted.", param="resume")
    return document


def _check_files(checkpoint: Path, checksums: Mapping[str, str]) -> None:
    for name, checksum in checksums.items():
        file = checkpoint / name
        if not file.is_file():
            raise _damaged(file, "it is missing")
        if _checksum(file) != checksum:
            raise _damaged(file, "its content does not match the checksum taken when it was saved")


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"the saved run is damaged: {path}: {reason}; restore the file, or start anew in another folder.",
        param="resume",
    )


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror or problem}.", param="resume") from None


def _document_checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in {errno.EINVAL, errno.EROFS}:  # a file system that knows no sync
            raise
    finally:
        os.close(descriptor)


def _explain(path: Path, problem: OSError) -> UserError:
    if problem.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CapacityError(f"the disk is full: {path} could not be written; what was there before is as it was.")
    return UserError(f"cannot write {path}: {problem.strerror or problem}.", param="out")
