"""`headrace bench cpu` measures both paths in one run and says against what."""

import json
from pathlib import Path

import pytest

from headrace.cli import bench, main
from headrace.kernels.native.library import available, why_absent


@pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")
def test_figures_of_both_paths_come_with_their_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("STEPS", 1), ("PREFILL", 40)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "_ROOT", tmp_path)  # no history and no second model
    assert main(["bench", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eager"].startswith("the PyTorch path of this version")
    assert (found["kernels"], found["threads"]) == ("native", 1)
    assert set(found["models"]) == {"nano"}
    nano = found["models"]["nano"]
    for name in ("decode_1", "decode_8", "prefill"):
        eager, native = nano[name]["eager"], nano[name]["native"]
        assert eager["cpu_ms"] > 0 and native["samples"] >= 1
        assert nano[name]["ratio"] == pytest.approx(eager["cpu_ms"] / native["cpu_ms"])
    assert set(nano["streams_8_over_1"]) == {"eager", "native"}


def test_kernels_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", "--kernels", "fast"]) == 2
    assert "kernels are 'fast'" in capsys.readouterr().err
