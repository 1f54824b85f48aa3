"""Single safetensors files that are not checkpoints: traces, feeds, images."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.core.errors import CapacityError, UserError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file.

    Raises:
        UserError: the file is missing, unreadable or not a whole safetensors file.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a safetensors file is accepted.") from None
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as a safetensors file: {_reason(problem)}.") from None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file under a temporary name beside it and move it into place.

    Raises:
        CapacityError: the disk is full.
        UserError: the file cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; the name of a file to write is accepted.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as problem:
        text = _reason(problem)
        if "No space left" in text or "os error 28" in text:
            raise CapacityError(f"the disk is full: {path} could not be written.") from None
        raise UserError(f"{path} cannot be written: {text}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _reason(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return " ".join(str(problem).split()).rstrip(".")
