"""Sets up the row store of a checkpoint: which source its n-gram tables are read through, and how much is cached."""

import os
from dataclasses import dataclass

from headrace.checkpoint.catalog import TensorEntry
from headrace.core.errors import InternalError, UserError
from headrace.memory.read_pool import ReadPool
from headrace.memory.read_source import ReadSource, StoredRows
from headrace.memory.row_source import RowSource, TableSource
from headrace.memory.row_store import RowStore
from headrace.memory.source_name import SCALES_NAMES, SOURCE_NAMES, ScalesName, SourceName
from headrace.memory.table import MemoryTable
from headrace.models.deepseek_v41.weights import Weights

DEFAULT_WORKERS = 4
_MAX_WORKERS = 64
_DEFAULT_CACHE_BYTES = 256 * 2**20
_SCALES = slice(1, 2)  # of a table's two tensors
_MAPPED_SHARE = 0.5  # of memory that tables may take before they are read row by row
_SCALES_SHARE = 0.125  # of memory that the scales of such tables may take before they are read too


@dataclass(frozen=True)
class StoreSettings:
    """How a row store is set up.

    Attributes:
        source: where rows come from.
        scales: of the source "read": all scales in memory, or read with the codes; None takes memory for scales up to
            an eighth of the machine's.
        cache_bytes: budget of the row cache; None is, for the source "read", 256 MiB or, if that is less, the tables'
            size, and none for the others: the system keeps their pages.
        workers: threads of the source "read".
    """

    source: SourceName
    scales: ScalesName | None = None
    cache_bytes: int | None = None
    workers: int = DEFAULT_WORKERS


def check_settings(source: str | None, scales: str | None, cache_bytes: int | None, workers: int) -> None:
    """Check what `open_store` is asked for.

    Raises:
        UserError: a value is out of range.
    """
    if scales is not None and scales not in SCALES_NAMES:
        accepted = ", ".join(map(repr, SCALES_NAMES))
        raise UserError(f"ngram_scales is {scales!r}; accepted are {accepted}", param="ngram_scales")
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
    return "read" if table_bytes(weights) > _MAPPED_SHARE * _memory() else "mmap"


def open_store(weights: Weights, settings: StoreSettings) -> RowStore:
    """Return the row store of a loaded checkpoint.

    Args:
        weights: loaded, with tables in memory where the source is "memory" and mapped ones otherwise.
        settings: what to set up.

    Raises:
        CheckpointError: a file cannot be opened, or scales that are to be in memory cannot be read.
        UserError: the row cache, which is taken at once, is to be larger than this machine's memory.
    """
    cache_bytes, scales_at = settings.cache_bytes, settings.scales
    if cache_bytes is not None and cache_bytes > _memory():
        message = f"ngram_cache_bytes is {cache_bytes}; accepted are at most the {_memory()} bytes of this machine"
        raise UserError(message, param="ngram_cache_bytes")
    if cache_bytes is None:
        cache_bytes = min(_DEFAULT_CACHE_BYTES, table_bytes(weights)) if settings.source == "read" else 0
    if scales_at is None:
        scales_at = "memory" if table_bytes(weights, parts=_SCALES) <= _SCALES_SHARE * _memory() else "file"
    pool = ReadPool(settings.workers) if settings.source == "read" else None
    sources: list[RowSource] = []
    for layer_id, table in weights.tables.items():
        if pool is not None:
            codes, scales = (_stored_rows(weights.catalog.tensors[name]) for name in _names(layer_id))
            sources.append(ReadSource(layer_id, codes, scales, pool, has_resident_scales=scales_at == "memory"))
        elif isinstance(table, MemoryTable):
            sources.append(TableSource(table))
        else:
            raise InternalError(f"the n-gram table of layer {layer_id} is neither in memory nor mapped")
    return RowStore(sources, cache_bytes=cache_bytes, pool=pool)


def table_bytes(weights: Weights, *, parts: slice = slice(None)) -> int:
    """Return the bytes of all n-gram tables as stored; `parts` chooses among codes and scales."""
    names = [name for layer_id in weights.tables for name in _names(layer_id)[parts]]
    return sum(weights.catalog.tensors[name].nbytes for name in names)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _names(layer_id: int) -> tuple[str, str]:
    return f"layers.{layer_id}.engram.embed.weight", f"layers.{layer_id}.engram.embed.scale"


def _stored_rows(entry: TensorEntry) -> StoredRows:
    return StoredRows(entry.file, entry.offset, entry.shape[0], entry.nbytes // entry.shape[0])
