"""Small tables in every kind of source, and what their rows are by definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.memory.read_pool import ReadPool
from headrace.memory.read_source import ReadSource, StoredRows
from headrace.memory.row_source import RowSource, TableSource
from headrace.memory.row_store import RowStore
from headrace.memory.table import MappedTable, MemoryTable

HEAD_DIM, COLUMNS = 64, 6
ROWS = {1: 300, 14: 421}
READING = ("read", "read, scales in memory")
KINDS = ("memory", "mmap", *READING)


@dataclass(frozen=True)
class Tables:
    """Codes and scales of two layers, in memory and in files behind headers of odd size."""

    arrays: dict[int, tuple[np.ndarray, np.ndarray]]
    folder: Path

    @classmethod
    def write(cls, folder: Path, seed: int = 0) -> "Tables":
        rng = np.random.default_rng(seed)
        arrays = {}
        for layer_id, rows in ROWS.items():
            codes = rng.integers(0, 256, (rows, HEAD_DIM)).astype(np.uint8)
            codes[(codes & 0x7F) == 0x7F] = 1
            arrays[layer_id] = (codes, rng.integers(60, 190, (rows, HEAD_DIM // 32)).astype(np.uint8))
        made = cls(arrays, folder)
        made.save()
        return made

    def save(self) -> None:
        for layer_id, parts in self.arrays.items():
            for name, array, header in zip(("codes", "scales"), parts, (4099, 8), strict=True):
                self.file(layer_id, name).write_bytes(bytes(header) + array.tobytes())

    def file(self, layer_id: int, name: str) -> Path:
        return self.folder / f"{layer_id}.{name}"

    def stored(self, layer_id: int) -> tuple[StoredRows, StoredRows]:
        rows = ROWS[layer_id]
        return (
            StoredRows(self.file(layer_id, "codes"), 4099, rows, HEAD_DIM),
            StoredRows(self.file(layer_id, "scales"), 8, rows, HEAD_DIM // 32),
        )

    def table(self, layer_id: int) -> MemoryTable:
        return MemoryTable(layer_id, *self.arrays[layer_id])

    def source(self, kind: str, layer_id: int, pool: ReadPool | None) -> RowSource:
        if kind in READING:
            assert pool is not None
            is_resident = kind == "read, scales in memory"
            return ReadSource(layer_id, *self.stored(layer_id), pool, has_resident_scales=is_resident)
        if kind == "memory":
            return TableSource(self.table(layer_id))
        maps = [
            np.memmap(part.file, dtype=np.uint8, mode="r", offset=part.offset, shape=(part.rows, part.row_bytes))
            for part in self.stored(layer_id)
        ]
        return TableSource(MappedTable(layer_id, *maps))

    def store(self, kind: str, *, workers: int = 3, is_native: bool = True, **options: int) -> RowStore:
        pool = ReadPool(workers, is_native=is_native) if kind in READING else None
        return RowStore([self.source(kind, layer_id, pool) for layer_id in ROWS], pool=pool, **options)

    def expected(self, row_ids_TLC: np.ndarray) -> list[torch.Tensor]:
        """What the tables say when they are asked directly."""
        return [self.table(layer_id).lookup(row_ids_TLC[:, place]).flatten(1) for place, layer_id in enumerate(ROWS)]


def some_ids(tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [np.minimum(rng.zipf(1.3, (tokens, COLUMNS)) - 1, rows - 1) for rows in ROWS.values()]
    return np.stack(parts, axis=1)


def bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.int16) for tensor in tensors]


def rows_of(store: RowStore, row_ids_TLC: np.ndarray) -> list[torch.Tensor]:
    collected = store.collect(row_ids_TLC)
    return [collected.layer(layer_id)[0] for layer_id in ROWS]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))
