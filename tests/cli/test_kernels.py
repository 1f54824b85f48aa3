"""`headrace kernels` says what does each operation and why."""

import json
from pathlib import Path

import pytest
from torch import Tensor

from headrace.cli import main
from headrace.kernels.native import library
from headrace.kernels.native.choice import OPERATIONS, choose
from headrace.kernels.native.conformance import FOLDERS
from headrace.kernels.native.library import Library, available
from headrace.kernels.native.quantise import quantise_q8

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {library.why_absent()}")


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["kernels", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_pytorch_does_everything_unless_something_else_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    found = document(capsys)
    assert found["id"] == "torch"
    assert [one["implementation"] for one in found["operations"]] == ["torch"] * len(OPERATIONS)  # type: ignore[attr-defined]


@needs_kernels
def test_a_mix_is_named_with_reasons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "native:experts,mhc")
    found = document(capsys)
    assert found["id"] == "native:mhc,experts"
    assert found["instruction_set"] in available()
    by_name = {one["operation"]: one for one in found["operations"]}  # type: ignore[attr-defined]
    assert by_name["mhc"]["implementation"] == by_name["experts"]["implementation"] == "native"
    assert by_name["head"]["reason"] == "not among the operations asked for"
    assert main(["kernels"]) == 0
    assert "native:mhc,experts" in capsys.readouterr().out


@needs_kernels
def test_a_check_says_that_every_kernel_is_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--check", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["kernel"] for one in checks] == list(FOLDERS)
    assert all(one["cases"] > 0 and one["differing"] == [] for one in checks)


@needs_kernels
def test_a_kernel_that_differs_is_named_and_the_status_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(library: Library, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantise_q8(library, x)
        return codes, scales + 1

    monkeypatch.setattr("headrace.kernels.native.quantise.conformance.quantise_q8", wrong)
    assert main(["kernels", "--check"]) == 1
    shown = capsys.readouterr().out
    assert f"one group: result 1 differs on {available()[-1]}" in shown
    assert shown.count("equal to the reference") == len(FOLDERS) - 1


@pytest.mark.parametrize("wanted", ["fast", "native:", "native:sorting", "torch:mhc", ""])
def test_another_choice_is_refused_in_one_sentence(
    wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", wanted)
    status = main(["kernels"])
    shown = capsys.readouterr().err
    assert (status, shown.count("\n")) == ((0, 0) if wanted == "" else (2, 1))
    if wanted:
        assert "kernels are" in shown or "no native kernel" in shown


def _damaged(kernels: Path) -> list[tuple[bytes, str]]:
    """Return libraries that cannot be used, and what is said of each."""
    if not kernels.exists():
        return [(b"", "cannot be loaded")]
    whole = kernels.read_bytes()
    other = whole.replace(b"quantise/quantise.h ", b"quantise/quantity.h ")
    return [
        (b"", "cannot be loaded"),
        (whole[: len(whole) // 2], "is cut short"),
        (other, "was built from other sources"),
    ]


def test_without_a_library_everything_is_pytorch_and_asking_for_kernels_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = library._FILE
    monkeypatch.setattr(library, "_FILE", tmp_path / "_kernels.so")
    library._open.cache_clear()
    library.load.cache_clear()
    try:
        assert choose("auto").id == "torch"
        assert "without a C++ compiler" in choose("auto").reasons["mhc"]
        monkeypatch.setenv("HEADRACE_KERNELS", "native")
        assert main(["kernels"]) == 2
        assert "without a C++ compiler" in capsys.readouterr().err
        (tmp_path / "_kernels.so").write_bytes(b"no library")
        library._open.cache_clear()
        assert "cannot be loaded" in choose("auto").reasons["mhc"]
        for content, said in _damaged(kernels):
            (tmp_path / "_kernels.so").unlink()
            (tmp_path / "_kernels.so").write_bytes(content)
            library._open.cache_clear()
            assert said in choose("auto").reasons["mhc"]
    finally:
        library._open.cache_clear()
        library.load.cache_clear()
