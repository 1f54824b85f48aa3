"""Builds the CPU kernel library beside the package; without a C++ compiler the package installs and runs all the same.

One source file is compiled once per instruction set and linked into one library, which chooses at run time. It is no
Python module: it is loaded with ctypes, so one library serves every Python version.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FOLDER = "src/headrace/kernels/native"
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi", "-w", "-g0"]
_PLAIN = ("dispatch", "pool", "row_reader", "row_cache")  # compiled once
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [
    *_AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vbmi", "vnni", "bf16")),
    "-mprefer-vector-width=512",
]


def _variants() -> dict[str, list[str]]:
    """Return compiler flags per instruction set."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {"portable": [], "avx2": _AVX2, "avx512": _AVX512}
    return {"portable": []}


def _fingerprint() -> str:
    """Return the names of all sources and a fingerprint of them; the package compares it with the files it holds."""
    folder, total = Path(_FOLDER), hashlib.sha256()
    files = [path for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    for name in names:
        total.update(name.encode() + b"\n" + (folder / name).read_bytes())
    return " ".join([*names, total.hexdigest()[:16]])


class BuildKernels(build_ext):
    """Compile `kernels.cpp` for every instruction set and link one plain shared library."""

    def build_extension(self, ext: Extension) -> None:
        """Build the one extension; a failure is a warning, because the extension is optional."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = []
        for name, flags in _variants().items():
            folder = Path(self.build_temp) / name
            objects += self.compiler.compile(
                [f"{_FOLDER}/kernels.cpp"],
                output_dir=str(folder),
                extra_postargs=[*_FLAGS, *flags],
                depends=ext.depends,
            )
        objects += self.compiler.compile(
            [f"{_FOLDER}/{name}.cpp" for name in _PLAIN],
            output_dir=str(self.build_temp),
            extra_postargs=[*_FLAGS, f'-DHR_SOURCES="{_fingerprint()}"'],
        )
        self.compiler.link_shared_object(objects, str(target), target_lang="c++", extra_postargs=["-pthread"])

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without Python's version: it has no part of Python in it."""
        return str(Path(*fullname.split("."))) + ".so"


_sources = [f"{_FOLDER}/{name}.cpp" for name in ("kernels", *_PLAIN)]
_depends = sorted(str(path) for pattern in ("**/*.h", "**/*.cpp") for path in Path(_FOLDER).glob(pattern))
setup(
    ext_modules=[Extension("headrace.kernels.native._kernels", sources=_sources, depends=_depends, optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
