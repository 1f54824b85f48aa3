"""Reads a checkpoint in the official format back into masters: what `export.py` writes, decoded.

The values are those that serving computes with, so rounding them again changes none.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headrace.core.errors import InternalError
from headrace.kernels.block_quant import decode_fp8_weight, decode_q4i
from headrace.memory.table import Table
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.weights import Weights, load_weights
from headrace.train.masters import Masters, master_shapes

_ROWS_AT_ONCE = 65536


def read_masters(folder: Path, stored: Config, wanted: Config) -> Masters:
    """Read the text backbone of a checkpoint; draft layers and vision tower stay on disk.

    Args:
        folder: the checkpoint.
        stored: its configuration.
        wanted: the same without draft and vision.

    Returns:
        float32 masters that want no gradient.

    Raises:
        CheckpointError: a tensor is missing or damaged.

    Numerics: exact; every stored value is a bfloat16 or float32 number.
    """
    weights = load_weights(folder, stored, skip_draft=True, skip_vision=True, engram="memory")
    shapes, buffers = master_shapes(wanted)
    parameters = {}
    for name, shape in shapes.items():
        value = _decode(name, shape, weights, wanted.block).float().contiguous()
        if tuple(value.shape) != shape:
            raise InternalError(f"tensor {name} came out as {list(value.shape)}, not {list(shape)}")
        parameters[name] = nn.Parameter(value, requires_grad=False)
    return Masters(wanted, parameters, {name: weights.tensors[name].float() for name in buffers})


def _decode(name: str, shape: tuple[int, ...], weights: Weights, block: int) -> Tensor:
    tensors = weights.tensors
    if ".ffn.experts." in name:
        module, _, part = name.rpartition(".")
        each = [f"{module}.{expert}.{part}" for expert in range(shape[0])]
        return torch.stack(
            [decode_q4i(_bytes(tensors, f"{one}.weight"), _bytes(tensors, f"{one}.scale")) for one in each]
        )
    if name.endswith(".engram.embed.weight"):
        return _rows(weights.tables[int(name.split(".")[1])])
    scale = f"{name.removesuffix('.weight')}.scale"
    if scale in tensors:
        return decode_fp8_weight(_bytes(tensors, name), _bytes(tensors, scale), block)
    return tensors[name]


def _bytes(tensors: dict[str, Tensor], name: str) -> Tensor:
    return tensors[name].contiguous().view(torch.uint8)


def _rows(table: Table) -> Tensor:
    starts = range(0, table.rows, _ROWS_AT_ONCE)
    parts = [table.lookup(np.arange(start, min(start + _ROWS_AT_ONCE, table.rows))) for start in starts]
    return torch.cat([part.float() for part in parts])
