"""Where the library can be built it is there: without it the tests of kernels are skipped, which must not go unseen."""

import shutil

import pytest

from headrace.kernels.native.library import why_absent

_COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler here")
def test_the_library_is_built_from_these_sources_where_there_is_a_compiler() -> None:
    assert why_absent() is None
