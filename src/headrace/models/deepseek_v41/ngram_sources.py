"""Sets up the row store of a checkpoint: which source its n-gram tables are read through, and how much is cached."""

import os

from headrace.checkpoint.catalog import TensorEntry
from headrace.core.errors import InternalError, UserError
from headrace.memory.read_pool import ReadPool
from headrace.memory.read_source import ReadSource, StoredRows
from headrace.memory.row_source import RowSource, TableSource
from headrace.memory.row_store import RowStore
from headrace.memory.source_name import SOURCE_NAMES, SourceName
from headrace.memory.table import MemoryTable
from headrace.models.deepseek_v41.weights import Weights

DEFAULT_WORKERS = 4
_MAX_WORKERS = 64
_DEFAULT_CACHE_BYTES = 256 * 2**20
_MAPPED_SHARE = 0.5  # of memory that tables may take before they are read row by row


def check_settings(source: str | None, cache_bytes: int | None, workers: int) -> None:
    """Check what `open_store` is asked for.

    Raises:
        UserError: a value is out of range.
    """
    if source is not None and source not in SOURCE_NAMES:
        accepted = ", ".join(map(repr, SOURCE_NAMES))
        raise UserError(f"ngram_source is {source!r}; accepted are {accepted}", param="ngram_source")
    if cache_bytes is not None and (isinstance(cache_bytes, bool) or cache_bytes < 0):
        message = f"ngram_cache_bytes is {cache_bytes!r}; accepted is a whole number of bytes from 0"
        raise UserError(message, param="ngram_cache_bytes")
    if isinstance(workers, bool) or not 1 <= workers <= _MAX_WORKERS:
        raise UserError(f"ngram_workers is {workers!r}; accepted are 1 to {_MAX_WORKERS}", param="ngram_workers")


def default_source(weights: Weights) -> SourceName:
    """Return "mmap", or "read" for tables whose pages would push everything else out of this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "read" if table_bytes(weights) > _MAPPED_SHARE * memory else "mmap"


def open_store(weights: Weights, source: SourceName, cache_bytes: int | None, workers: int) -> RowStore:
    """Return the row store of a loaded checkpoint.

    Args:
        weights: loaded, with tables in memory where the source is "memory" and mapped ones otherwise.
        source: where rows come from.
        cache_bytes: budget of the row cache; None is, for the source "read", 256 MiB or, if that is less, the tables'
            size, and none for the others: the system keeps their pages.
        workers: threads of the source "read".

    Raises:
        CheckpointError: a file cannot be opened.
    """
    if cache_bytes is None:
        stored = table_bytes(weights)
        cache_bytes = min(_DEFAULT_CACHE_BYTES, stored) if source == "read" else 0
    pool = ReadPool(workers) if source == "read" else None
    sources: list[RowSource] = []
    for layer_id, table in weights.tables.items():
        if pool is not None:
            codes, scales = (_stored_rows(weights.catalog.tensors[name]) for name in _names(layer_id))
            sources.append(ReadSource(layer_id, codes, scales, pool))
        elif isinstance(table, MemoryTable):
            sources.append(TableSource(table))
        else:
            raise InternalError(f"the n-gram table of layer {layer_id} is neither in memory nor mapped")
    return RowStore(sources, cache_bytes=cache_bytes, pool=pool)


def table_bytes(weights: Weights) -> int:
    """Return the bytes of all n-gram tables as stored."""
    return sum(weights.catalog.tensors[name].nbytes for layer_id in weights.tables for name in _names(layer_id))


def _names(layer_id: int) -> tuple[str, str]:
    return f"layers.{layer_id}.engram.embed.weight", f"layers.{layer_id}.engram.embed.scale"


def _stored_rows(entry: TensorEntry) -> StoredRows:
    return StoredRows(entry.file, entry.offset, entry.shape[0], entry.nbytes // entry.shape[0])
