"""The pool's numbers of calls, which a server that runs for days counts through: they begin anew."""

import shutil
import subprocess
from pathlib import Path

import pytest

_POOL = Path(__file__).parents[3] / "src" / "headrace" / "kernels" / "native" / "pool.cpp"
_COMPILER = shutil.which("c++") or shutil.which("g++")
_PROGRAM = """
#include "pool.cpp"
#include <cstdio>

int main() {
  // where a signed number of calls and pieces ends, and where an unsigned one does
  const uint64_t starts[] = {(uint64_t)1 << 63, 0};
  hr_set_threads(3);
  for (const uint64_t start : starts) {
    pool().ticket.store(start - 40 * CALL);
    for (int call = 0; call < 80; call++) {
      std::atomic<int64_t> sum{0}, pieces{0};
      pool().balance = Balance{};
      parallel(50, [&](int64_t piece) { sum += piece, pieces++; });
      if (sum != 49 * 25 || pieces != 50) {
        printf("call %d from %llx: %lld pieces\\n", call - 40, (unsigned long long)start, (long long)pieces);
        return 1;
      }
    }
  }
}
"""


@pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler here")
def test_every_piece_is_computed_once_where_the_number_of_calls_begins_anew(tmp_path: Path) -> None:
    assert _COMPILER is not None
    source, program = tmp_path / "calls.cpp", tmp_path / "calls"
    source.write_text(_PROGRAM)
    flags = ["-std=c++17", "-O1", "-w", "-pthread", f"-I{_POOL.parent}"]
    subprocess.run([_COMPILER, *flags, str(source), "-o", str(program)], check=True, timeout=120)
    found = subprocess.run([str(program)], capture_output=True, text=True, timeout=30, check=False)
    assert (found.returncode, found.stdout) == (0, "")
