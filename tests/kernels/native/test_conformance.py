"""Every kernel is its reference, bit for bit, on every instruction set; each operation is one folder."""

from pathlib import Path

import pytest
import torch

from headrace.kernels import native
from headrace.kernels.native.benchmark import measure, workloads
from headrace.kernels.native.choice import OPERATIONS
from headrace.kernels.native.conformance import FOLDERS, TRAINING, Case, cases, differing
from headrace.kernels.native.library import available, load, why_absent
from headrace.kernels.native.quantise import quantise_q8
from headrace.kernels.native.samples import Samples

pytestmark = pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")

PARTS = ("__init__.py", "reference.py", "kernel.cpp", "conformance.py", "benchmark.py")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_kernel_is_its_reference_on_every_instruction_set(folder: str) -> None:
    libraries = [load(name) for name in available()]
    assert [said for case in cases(folder) for said in differing(case, libraries)] == []


def test_an_operation_is_a_folder_with_five_parts() -> None:
    root = Path(native.__file__).parent
    folders = {path.parent.name for path in root.glob("*/kernel.cpp")}
    assert folders == {*FOLDERS, *TRAINING}
    assert [str(path) for name in FOLDERS for part in PARTS if not (path := root / name / part).is_file()] == []
    assert set(OPERATIONS) - {"mhc"} <= folders  # that one is called by what it computes: streams


def test_what_a_kernel_does_not_write_is_seen() -> None:
    x = Samples(0).rows(4, 64)

    def half(library: native.library.Library) -> list[torch.Tensor]:
        codes, scales = quantise_q8(library, x[:2].contiguous())
        whole = torch.empty((4, 64), dtype=torch.uint8), torch.empty((4, 2), dtype=torch.uint8)
        whole[0][:2], whole[1][:2] = codes, scales
        return list(whole)

    found = differing(Case("half of the rows", half, lambda: quantise_q8(load(), x)), [load()])
    name = load().instruction_set
    assert found == [f"half of the rows: result {place} differs on {name}" for place in (0, 1)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_code_of_both_formats_is_among_the_samples() -> None:
    samples = Samples(1)
    assert len(set(samples.codes(32, 32).flatten().tolist())) == 254
    assert 0x7F not in (samples.codes(64, 64) & 0x7F)


@pytest.mark.parametrize("folder", ["quantise", "router", "ngram", "compress", "rows"])
def test_a_benchmark_times_what_it_names(folder: str) -> None:
    load().use_threads(1)
    for workload in workloads(folder, load()):
        timing = measure(workload, seconds=0.002)
        assert timing.cpu_s > 0 and timing.gigabytes_per_s > 0 and timing.gigaflops > 0
