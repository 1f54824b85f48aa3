"""Runs every kernel against its reference, bit for bit; each operation's folder lists its cases.

`headrace kernels --check` and the tests run them on every instruction set that the processor has.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headrace.kernels.native.library import Library

FOLDERS: Final = (
    *("quantise", "product", "streams", "rows", "attention", "index", "compress", "ngram", "router", "experts", "head"),
)
"""Operations of the cached path, each one folder."""

TRAINING: Final = (
    *("attention_gradient", "cross_entropy", "rotation", "streams_gradient", "swiglu_gradient", "weight_gradient"),
)
"""Kernels of training; their reference is autograd, or the operation in PyTorch: `tests/kernels/native` compares."""

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Case:
    """Inputs that a kernel and its reference are given: `run` takes the kernels, `wanted` computes the same anew.

    Both return tensors whose bits must be equal, one after the other; rows that nobody promises are left out by both.
    """

    name: str
    run: Callable[[Library], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]


def cases(folder: str) -> list[Case]:
    """Return the cases of one operation, seeded: the same every time."""
    module = importlib.import_module(f"headrace.kernels.native.{folder}.conformance")
    found: list[Case] = module.cases()
    return found


def differing(case: Case, libraries: Sequence[Library]) -> list[str]:
    """Say which results of a case differ from the reference, on which instruction sets.

    State: fills new tensors with NaN or the largest integer meanwhile, in the whole process: what a kernel does not
    write is seen.
    """
    with _poisoned():
        wanted = list(case.wanted())
        return [
            f"{case.name}: result {place} differs on {library.instruction_set}"
            for library in libraries
            for place, (one, other) in enumerate(zip(case.run(library), wanted, strict=True))
            if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other))
        ]


@contextmanager
def _poisoned() -> Iterator[None]:
    with _one_at_a_time:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return torch.where(tensor.isnan(), -1, bits)
