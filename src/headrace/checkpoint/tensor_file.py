"""Single safetensors files that are not checkpoints: traces, feeds, images."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from headrace.core.errors import CapacityError, UserError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file.

    Raises:
        UserError: the file is missing, unreadable or not a whole safetensors file.
    """
    if path.exists() and (not path.is_file() or not os.access(path, os.R_OK)):
        raise UserError(f"{path} is not a file that may be read; a safetensors file is accepted.")
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a safetensors file is accepted.") from None
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} cannot be read as a safetensors file: {_reason(problem)}.") from None


def check_target(path: Path) -> Path:
    """Return the file that a write to `path` makes or replaces, links followed; called before long work.

    Raises:
        UserError: it is not a regular file, or its folder does not exist or may not be written to.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise UserError(f"{path} is not a regular file; the name of a file to write is accepted.")
    if not target.parent.is_dir():
        raise UserError(
            f"{path} cannot be written: its folder does not exist; a file in an existing folder is accepted."
        )
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: its folder may not be written to; another folder is needed.")
    return target


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file under a temporary name beside it and move it into place.

    Raises:
        CapacityError: the disk is full.
        UserError: the file cannot be written.
    """
    target = check_target(path)
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        save_file(tensors, partial)
        partial.chmod(0o666 & ~_umask())
        partial.replace(target)
    except (OSError, SafetensorError) as problem:
        text = _reason(problem)
        if "No space left" in text or "os error 28" in text:
            raise CapacityError(f"the disk is full: {path} could not be written.") from None
        raise UserError(f"{path} cannot be written.") from None
    finally:
        partial.unlink(missing_ok=True)


def tensors_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Return the content of a safetensors file."""
    content: bytes = save(tensors)
    return content


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _reason(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return " ".join(str(problem).split()).rstrip(".")
