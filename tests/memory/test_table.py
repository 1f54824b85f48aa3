import mmap
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from headrace.core.errors import CheckpointError, InternalError, UserError
from headrace.memory import table as table_module
from headrace.memory.table import MappedTable, MemoryTable

ROWS, HEAD_DIM = 300, 64


def finite_codes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return finite_codes(rng, (ROWS, HEAD_DIM)), rng.integers(60, 190, (ROWS, HEAD_DIM // 32)).astype(np.uint8)


def map_file(path: pathlib.Path, array: np.ndarray, header_bytes: int) -> np.memmap:
    """Write the array behind a header of odd size, as inside a safetensors file, and map it read-only."""
    path.write_bytes(bytes(header_bytes) + array.tobytes())
    return np.memmap(path, dtype=np.uint8, mode="r", offset=header_bytes, shape=array.shape)


def e4m3_by_definition(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def dequantised_by_definition(codes: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    values = torch.tensor([e4m3_by_definition(code) for code in range(256)], dtype=torch.float64)
    factors = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64)
    code_index, scale_index = torch.from_numpy(codes).long(), torch.from_numpy(scales).long()
    return (values[code_index] * factors[scale_index].repeat_interleave(32, dim=-1)).to(torch.bfloat16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def test_every_code_under_every_normal_scale_is_exact() -> None:
    # 256 codes (NaN ones replaced) under all scales whose products bfloat16 can hold
    codes = np.tile(np.arange(256, dtype=np.uint8), (244, 1))
    codes[:, [0x7F, 0xFF]] = 0
    scales = np.repeat(np.arange(3, 247, dtype=np.uint8)[:, None], 8, axis=1)
    got = MemoryTable(1, codes, scales).lookup(np.arange(244))
    exact = dequantised_by_definition(codes, scales)
    assert torch.equal(bits(got), bits(exact))
    assert torch.isfinite(got).all()


def test_lookup_equals_definition_in_any_shape_order_and_repetition(
    arrays: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_SLICE_ROWS", 7)  # several slices, the last one short
    codes, scales = arrays
    ids = np.random.default_rng(1).integers(0, ROWS, (5, 6))
    ids[0, :2] = ids[4, 5]
    got = MemoryTable(1, codes, scales).lookup(ids)
    assert got.shape == (5, 6, HEAD_DIM)
    assert got.dtype == torch.bfloat16
    assert torch.equal(bits(got), bits(dequantised_by_definition(codes[ids], scales[ids])))


@pytest.mark.parametrize("header_bytes", [0, 8, 4099])
def test_mapped_table_reads_the_same_bits_as_memory(
    tmp_path: pathlib.Path, arrays: tuple[np.ndarray, np.ndarray], header_bytes: int
) -> None:
    codes, scales = arrays
    mapped = MappedTable(
        1, map_file(tmp_path / "codes", codes, header_bytes), map_file(tmp_path / "scales", scales, header_bytes)
    )
    ids = np.random.default_rng(2).integers(0, ROWS, (40, 6))
    assert (mapped.rows, mapped.head_dim) == (ROWS, HEAD_DIM)
    assert torch.equal(bits(mapped.lookup(ids)), bits(MemoryTable(1, codes, scales).lookup(ids)))


def test_one_mapping_may_hold_both_arrays(tmp_path: pathlib.Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    codes, scales = arrays
    whole = map_file(tmp_path / "shard", np.concatenate([codes.ravel(), scales.ravel()]), header_bytes=24)
    mapped = MappedTable(1, whole[: codes.size].reshape(codes.shape), whole[codes.size :].reshape(scales.shape))
    ids = np.arange(ROWS)[::-1]
    assert torch.equal(bits(mapped.lookup(ids)), bits(MemoryTable(1, codes, scales).lookup(ids)))


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="this system has no madvise")
def test_pages_of_all_rows_are_announced_once_before_reading(
    tmp_path: pathlib.Path, arrays: tuple[np.ndarray, np.ndarray]
) -> None:
    codes, scales = arrays
    advised: list[tuple[int, int]] = []

    class Recorder:
        def madvise(self, advice: int, start: int, length: int) -> None:
            assert advice == mmap.MADV_WILLNEED
            advised.append((start, length))

    header_bytes = 4090
    mapped = MappedTable(1, map_file(tmp_path / "codes", codes, header_bytes), map_file(tmp_path / "s", scales, 0))
    mapped._pages[0]._mapping = Recorder()
    mapped._pages[1]._advises = False
    page = mmap.PAGESIZE
    ids = np.array([0, 0, 299])
    mapped.prefetch(ids)
    # row 0 crosses from page 0 into page 1; row 299 is far away
    far = (header_bytes % page + 299 * HEAD_DIM) // page * page
    assert advised == [(0, 2 * page), (far, page)]
    covered = {byte for start, length in advised for byte in range(start, start + length)}
    wanted = {header_bytes % page + row * HEAD_DIM + column for row in ids for column in range(HEAD_DIM)}
    assert wanted <= covered


def test_refused_advice_does_not_fail_the_lookup(tmp_path: pathlib.Path, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    class Refusing:
        def madvise(self, *_: int) -> None:
            raise OSError("not on this file system")

    codes, scales = arrays
    mapped = MappedTable(1, map_file(tmp_path / "codes", codes, 0), map_file(tmp_path / "scales", scales, 0))
    for pages in mapped._pages:
        pages._mapping = Refusing()
    assert torch.equal(bits(mapped.lookup(np.array([5]))), bits(MemoryTable(1, codes, scales).lookup(np.array([5]))))


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
@pytest.mark.parametrize("method", ["lookup", "prefetch"])
def test_row_outside_the_table_is_refused_by_layer_and_row(
    arrays: tuple[np.ndarray, np.ndarray], method: str, bad: int
) -> None:
    with pytest.raises(UserError, match=rf"row {bad} is outside the n-gram table of layer 14; accepted are 0 to 299"):
        getattr(MemoryTable(14, *arrays), method)(np.array([[3, bad]]))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_code_is_refused_only_when_its_row_is_read(arrays: tuple[np.ndarray, np.ndarray], code: int) -> None:
    codes, scales = arrays
    codes[17, 40] = code
    damaged = MemoryTable(14, codes, scales)
    damaged.lookup(np.array([16, 18]))
    with pytest.raises(UserError, match="layer 14: row 17 holds an E4M3 NaN code"):
        damaged.lookup(np.array([[3, 17], [4, 5]]))


def test_nan_scale_is_refused_only_when_its_row_is_read(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    codes, scales = arrays
    scales[18, 1] = 255
    damaged = MemoryTable(1, codes, scales)
    damaged.lookup(np.array([17, 19]))
    with pytest.raises(UserError, match="layer 1: row 18 holds a scale byte of 255"):
        damaged.lookup(np.array([3, 18]))


def test_row_numbers_must_be_integers(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(UserError, match="must be integers, not float64"):
        MemoryTable(1, *arrays).lookup(np.array([1.0]))


def test_no_rows_give_an_empty_result(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    assert MemoryTable(1, *arrays).lookup(np.empty((0, 6), dtype=np.int64)).shape == (0, 6, HEAD_DIM)


@pytest.mark.parametrize(
    ("codes_shape", "scales_shape", "message"),
    [
        ((4, 64), (4, 1), r"scales have shape \[4, 1\]; codes of this size need \[4, 2\]"),
        ((4, 64), (3, 2), r"need \[4, 2\]"),
        ((4, 48), (4, 2), "rows are 48 wide"),
        ((4,), (4, 2), "codes have shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(codes_shape: tuple, scales_shape: tuple, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        MemoryTable(1, np.zeros(codes_shape, np.uint8), np.zeros(scales_shape, np.uint8))


def test_ordinary_memory_is_not_accepted_as_a_mapping(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(InternalError, match="file mapping"):
        MappedTable(1, *arrays)


def test_big_mapped_table_is_not_read_in(tmp_path: pathlib.Path) -> None:
    # 2 GiB of holes; a process of its own, so that its peak memory is the table's doing
    rows, head_dim = 8 * 2**20, 256
    for name, row_bytes in (("codes", head_dim), ("scales", head_dim // 32)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(rows * row_bytes)
    code = f"""
import resource, numpy as np
from headrace.memory.table import MappedTable
codes = np.memmap(r"{tmp_path}/codes", dtype=np.uint8, mode="r", shape=({rows}, {head_dim}))
scales = np.memmap(r"{tmp_path}/scales", dtype=np.uint8, mode="r", shape=({rows}, {head_dim // 32}))
peak_kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak_kib()
table = MappedTable(1, codes, scales)
opened = peak_kib()
assert not table.lookup(np.linspace(0, {rows} - 1, 2000, dtype=np.int64)).any()
print(opened - before, peak_kib() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    opened_kib, read_kib = map(int, done.stdout.split())
    assert opened_kib < 4 * 1024
    assert read_kib < 64 * 1024  # 2,000 scattered rows: one 4 KiB page for codes and one for scales each, and slack


@pytest.mark.bench
def test_lookup_rate(tmp_path: pathlib.Path) -> None:
    rows, head_dim, picks = 400_000, 256, 2048 * 24
    rng = np.random.default_rng(0)
    codes, scales = finite_codes(rng, (rows, head_dim)), np.full((rows, head_dim // 32), 120, np.uint8)
    ids = rng.integers(0, rows, (2048, 24))
    tables = {
        "memory": MemoryTable(1, codes, scales),
        "mapped": MappedTable(1, map_file(tmp_path / "c", codes, 8), map_file(tmp_path / "s", scales, 8)),
    }
    for name, table in tables.items():
        table.lookup(ids)
        start, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        for _ in range(5):
            table.lookup(ids)
        seconds = (time.perf_counter() - start) / 5
        cpu = (resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu) / 5
        print(f"{name}: {picks / seconds / 1e6:.2f} M rows/s, {cpu * 1000:.0f} CPU-ms for 2,048 tokens")
