"""Damages copies of checkpoints for tests: rewrites a safetensors file with tensors changed, added or removed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], None]


def copy_with(source: Path, target: Path, change: Change) -> Path:
    """Copy a checkpoint folder and apply a change to the tensors of its single file."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("golden.safetensors"))
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def set_byte(name: str, index: int, value: int) -> Change:
    """Return the change that overwrites one byte of a tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].reshape(-1).view(torch.uint8)[index] = value

    return change


def drop(name: str) -> Change:
    """Return the change that removes a tensor."""
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Change:
    """Return the change that adds or replaces a tensor."""
    return lambda tensors: tensors.__setitem__(name, tensor)


def cast(name: str, dtype: torch.dtype) -> Change:
    """Return the change that stores a tensor in another dtype."""
    return lambda tensors: tensors.__setitem__(name, tensors[name].float().to(dtype))


def cut_byte(folder: Path, file: str = "model.safetensors") -> Path:
    """Cut the last byte off a file of a folder."""
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-1])
    return folder
