"""Finds and loads the kernel library, and says why there is none."""

import ctypes
import hashlib
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final

from headrace.core.errors import UserError

INSTRUCTION_SETS: Final = ("portable", "avx2", "avx512")
"""What kernels are compiled for, slowest first; the bits are the same."""

_FILE = Path(__file__).parent / "_kernels.so"


class Library:
    """The loaded kernels of one instruction set.

    Every function takes addresses and integers (64 bits) and returns 0; `call` raises for anything else.
    """

    def __init__(self, handle: ctypes.CDLL, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        self._handle = handle
        self._functions: dict[str, Any] = {}

    def use_threads(self, count: int) -> None:
        """Let kernels use `count` threads, this one included; it changes no bit."""
        self._handle.hr_set_threads(count)

    def function(self, name: str, num_arguments: int) -> Any:
        """Return a kernel that takes so many addresses or 64-bit integers."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = getattr(self._handle, f"{name}_{self.instruction_set}")
            found.argtypes = [ctypes.c_int64] * num_arguments
            found.restype = ctypes.c_int64
        return found


def available() -> tuple[str, ...]:
    """Return the instruction sets that the library was built for and this processor has, slowest first."""
    handle = _open()
    if isinstance(handle, str):
        return ()
    best = min(int(handle.hr_instruction_set()), len(INSTRUCTION_SETS) - 1)
    return tuple(name for name in INSTRUCTION_SETS[: best + 1] if hasattr(handle, f"hr_quantise_{name}"))


def why_absent() -> str | None:
    """Return why there are no native kernels here; None if there are."""
    handle = _open()
    return handle if isinstance(handle, str) else None


@cache
def load(instruction_set: str | None = None) -> Library:
    """Return the kernels of one instruction set, by default the best.

    Raises:
        UserError: there is no library, or the processor lacks the instruction set.
    """
    handle = _open()
    if isinstance(handle, str):
        raise UserError(f"native kernels are not there: {handle}", param="kernels")
    names = available()
    wanted = instruction_set or os.environ.get("HEADRACE_INSTRUCTION_SET") or names[-1]
    if wanted not in names:
        accepted = ", ".join(names)
        raise UserError(f"instruction set {wanted!r} is not there; accepted are {accepted}", param="kernels")
    return Library(handle, wanted)


def best_library() -> Library | None:
    """Return the kernels of the best instruction set, None where there are none."""
    return None if why_absent() else load()


def plain_function(name: str) -> Any | None:
    """Return a function that is the same for every instruction set, None where it is absent."""
    handle = _open()
    return None if isinstance(handle, str) else getattr(handle, name, None)


@cache
def _open() -> ctypes.CDLL | str:
    """Load the library, or return why that is not possible."""
    if not _FILE.exists():
        return "the package was installed without a C++ compiler that builds them (GCC 11 does); `pip install` it again"
    if _is_cut_short(_FILE):
        return f"{_FILE.name} is cut short; `pip install` the package again with a C++ compiler"
    try:
        handle = ctypes.CDLL(str(_FILE))
        handle.hr_instruction_set.restype = ctypes.c_int64
        handle.hr_set_threads.argtypes = [ctypes.c_int64]
        handle.hr_sources.restype = ctypes.c_char_p
        built_from = handle.hr_sources().decode("ascii")
    except (OSError, AttributeError) as problem:
        return f"{_FILE.name} cannot be loaded: {' '.join(str(problem).split())}"
    if not _are_sources(built_from):
        return f"{_FILE.name} was built from other sources; `python setup.py build_ext --inplace` builds it anew"
    return handle


def _is_cut_short(path: Path) -> bool:
    """Say whether an ELF file ends before its table of sections does; loading such a file can end the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False  # the loader says what is wrong with it
    (start,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size < start + size * count


def _are_sources(built_from: str) -> bool:
    """Say whether the files beside this one are those that a library was built from: names, then a fingerprint."""
    *names, fingerprint = built_from.split()
    folder, total = Path(__file__).parent, hashlib.sha256()
    for name in names:
        if not (folder / name).is_file():
            return False
        total.update(name.encode() + b"\n" + (folder / name).read_bytes())
    return total.hexdigest()[:16] == fingerprint
