"""Load the tensors of a checkpoint in their stored formats, and write them back bit for bit.

Tensors are read one at a time, straight into the buffer they stay in; Engram tables are mapped and not read. Every
tensor of the checkpoint is loaded exactly once or stands on the list of skipped ones with a reason, or the checkpoint
is refused. Source: spec sections 2 and 8.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.checkpoint.catalog import Catalog, TensorEntry, open_catalog
from headrace.checkpoint.reader import map_rows, read_tensor, tensor_bytes
from headrace.checkpoint.stream import pieces
from headrace.checkpoint.writer import DEFAULT_SHARD_BYTES, new_checkpoint
from headrace.core.errors import CheckpointError, UserError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec
from headrace.memory.table import MappedTable, MemoryTable, Table
from headrace.models.deepseek_v41.check import check_catalog, check_numbers
from headrace.models.deepseek_v41.config import Config, to_json
from headrace.models.deepseek_v41.inventory import expected_tensors

Convert = Callable[[TensorEntry, Tensor], Tensor]

_TOKENIZER = "tokenizer.json"
_VISION = ("vision.", "aligner.", "image_")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The loaded tensors of one checkpoint.

    `tensors` maps official names to tensors in their stored format (or as `convert` made them); whoever builds the
    model may take them out one by one. `tables` maps layer ids to Engram tables. `skipped` maps the name of every
    tensor that was not read to the reason. `catalog` says where the stored bytes lie.
    """

    config: Config
    catalog: Catalog
    tensors: dict[str, Tensor]
    tables: dict[int, Table]
    skipped: dict[str, str]


def skip_reason(name: str, *, skip_draft: bool, skip_vision: bool) -> str | None:
    """Say why a tensor need not be loaded; None if it must be."""
    if name.startswith("mtp."):
        if skip_draft:
            return "drafting is switched off"
        if name.endswith(".gate.bias_vl"):
            return "draft layers route with gate.bias only, so this tensor is stored but never used"
    if skip_vision and name.startswith(_VISION):
        return "images are switched off"
    return None


def load_weights(
    path: Path | str,
    config: Config,
    *,
    device: torch.device | str = "cpu",
    skip_draft: bool = False,
    skip_vision: bool = False,
    engram: Literal["mmap", "memory"] = "mmap",
    convert: Convert | None = None,
    progress: Callable[[int], object] | None = None,
) -> Weights:
    """Load a checkpoint.

    Args:
        path: checkpoint folder.
        config: its configuration.
        device: where tensors go, each as soon as it is read.
        skip_draft: leave the draft module on disk.
        skip_vision: leave the image tower on disk.
        engram: map the Engram tables from their files, or read them into memory.
        convert: called once per tensor with its entry and the stored tensor; what it returns is kept instead.
        progress: called with the number of bytes read since its last call.

    Returns:
        The tensors; `tensors`, `tables` and `skipped` together name every tensor of the checkpoint exactly once.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, unknown, or not what the configuration calls for; or a
            loaded tensor holds a code that is no finite number. Mapped tables are checked when rows are read.

    Numerics: bytes are not changed.
    State: none; at most one tensor is held beyond those that are returned.
    """
    catalog = open_catalog(path)
    check_catalog(catalog, config)
    tables = _table_names(config)
    tensors: dict[str, Tensor] = {}
    skipped: dict[str, str] = {}
    for entry in sorted(catalog.tensors.values(), key=lambda entry: (entry.file, entry.offset)):
        reason = skip_reason(entry.name, skip_draft=skip_draft, skip_vision=skip_vision)
        if reason is not None:
            skipped[entry.name] = reason
        elif entry.name not in tables:
            tensor = _read_checked(entry)
            if convert is not None:
                tensor = convert(entry, tensor)
            tensors[entry.name] = tensor.to(device)
            if progress:
                progress(entry.nbytes)
    return Weights(
        config=config, catalog=catalog, tensors=tensors, tables=_open_tables(catalog, config, engram), skipped=skipped
    )


def _read_checked(entry: TensorEntry) -> Tensor:
    tensor = read_tensor(entry)
    check_numbers(entry, tensor_bytes(tensor))
    return tensor


def _table_names(config: Config) -> frozenset[str]:
    layer_ids = config.engram.layer_ids if config.engram else ()
    return frozenset(f"layers.{layer_id}.engram.embed.{part}" for layer_id in layer_ids for part in ("weight", "scale"))


def _open_tables(catalog: Catalog, config: Config, engram: Literal["mmap", "memory"]) -> dict[int, Table]:
    tables: dict[int, Table] = {}
    for layer_id in config.engram.layer_ids if config.engram else ():
        parts = [catalog.tensors[f"layers.{layer_id}.engram.embed.{part}"] for part in ("weight", "scale")]
        if engram == "mmap":
            tables[layer_id] = MappedTable(layer_id, *map(map_rows, parts))
        else:
            codes, scales = (_read_checked(entry).view(torch.uint8).numpy() for entry in parts)
            tables[layer_id] = MemoryTable(layer_id, codes, scales)
    return tables


def save_weights(weights: Weights, out: Path | str, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write a whole checkpoint: loaded tensors from memory, tables and skipped tensors from the files they came from.

    Args:
        weights: loaded without `convert`, or with every tensor back in its stored format.
        out: a new or empty folder.
        max_shard_bytes: data per file; with more than that the checkpoint is sharded.

    Raises:
        UserError: a tensor was taken out or is not in its stored format, or the folder is not empty or not writable.
        CapacityError: the disk is full.
        CheckpointError: the files that tables or skipped tensors come from have changed or cannot be read.

    Numerics: every tensor is written with the bytes it has in memory or in its file; nothing is rounded.
    """
    config, catalog = weights.config, weights.catalog
    in_files = _table_names(config) | weights.skipped.keys()
    specs = list(expected_tensors(config))
    for spec in specs:
        if spec.name not in in_files:
            _check_stored(spec, weights.tensors.get(spec.name))

    def source(spec: TensorSpec) -> Iterable[NDArray[np.uint8]]:
        if spec.name in in_files:
            return pieces(catalog.tensors[spec.name])
        return tensor_bytes(weights.tensors[spec.name])

    folder = catalog.path if catalog.path.is_dir() else catalog.path.parent
    with new_checkpoint(Path(out)) as checkpoint:
        checkpoint.write_tensors(specs, source, max_shard_bytes=max_shard_bytes)
        if (folder / _TOKENIZER).is_file():
            checkpoint.write_bytes(_TOKENIZER, (folder / _TOKENIZER).read_bytes())
        checkpoint.write_json("config.json", to_json(config))


def _check_stored(spec: TensorSpec, tensor: Tensor | None) -> None:
    if tensor is None:
        raise UserError(f"tensor {spec.name} is not among the loaded weights any more, so it cannot be saved.")
    wanted = FORMATS[spec.dtype].torch_dtype
    if tensor.dtype != wanted or tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} is {list(tensor.shape)} {tensor.dtype}; {list(spec.shape)} {wanted} is what a "
            "checkpoint stores."
        )
