"""The sources ask compilers for no more than GCC 11 knows."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[3] / "src" / "headrace" / "kernels" / "native" / "kernels.cpp"
_COMPILER = shutil.which("g++")


@pytest.mark.skipif(_COMPILER is None, reason="no GCC here")
def test_a_compiler_without_shufflevector_reads_the_kernels() -> None:
    assert _COMPILER is not None
    older = ["-U__GNUC__", "-D__GNUC__=11", "-D__builtin_shufflevector=not_there"]
    command = [_COMPILER, "-std=c++17", "-fsyntax-only", "-w", *older, str(_SOURCE)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (0, "")
