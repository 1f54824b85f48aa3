"""Writes master parameters as a checkpoint in the official format, rounded to the stored formats."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.checkpoint.reader import tensor_bytes
from headrace.checkpoint.writer import DEFAULT_SHARD_BYTES, new_checkpoint
from headrace.core.errors import InternalError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config import to_json
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.train.masters import Masters
from headrace.train.quantise import encode_fp4_weight, encode_fp8_weight, encode_rows

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])$")


class StoredMasters:
    """Official tensors of a set of masters, encoded when asked for, weight and scale together."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._last: tuple[str, Tensor, Tensor] | None = None
        names = (spec.name for spec in expected_tensors(masters.config))
        self._scaled = frozenset(name for name in names if name.endswith(".scale"))

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return one stored tensor.

        Raises:
            InternalError: the masters hold no such tensor, or one of another shape.
        """
        tensor = self._find(spec.name)
        wanted = FORMATS[spec.dtype].torch_dtype
        if tensor.dtype == torch.uint8:
            tensor = tensor.view(wanted)
        tensor = tensor.detach().to(wanted).contiguous()
        if tuple(tensor.shape) != spec.shape:
            raise InternalError(f"tensor {spec.name} came out as {list(tensor.shape)}, not {list(spec.shape)}")
        return tensor

    def _find(self, name: str) -> Tensor:
        masters = self._masters
        module, _, part = name.rpartition(".")
        is_pair = part == "scale" or f"{module}.scale" in self._scaled
        if name in masters.buffers:
            return masters.buffers[name]
        if is_pair:
            weight, scale = self._encoded(module)
            return weight if part == "weight" else scale
        if name not in masters.parameters:
            raise InternalError(f"the masters have no tensor {name}")
        return masters.parameters[name]

    def _encoded(self, module: str) -> tuple[Tensor, Tensor]:
        if self._last is None or self._last[0] != module:
            self._last = (module, *self._encode(module))
        return self._last[1], self._last[2]

    def _encode(self, module: str) -> tuple[Tensor, Tensor]:
        parameters = self._masters.parameters
        expert = _EXPERT.match(module)
        if expert:
            return encode_fp4_weight(parameters[f"{expert[1]}.{expert[3]}"].detach()[int(expert[2])].float())
        weight = parameters[f"{module}.weight"].detach().float()
        if module.endswith("engram.embed"):
            return encode_rows(weight)
        return encode_fp8_weight(weight, self._masters.config.block)


def export_masters(masters: Masters, out: Path, tokenizer: bytes | None) -> None:
    """Write a checkpoint folder.

    Args:
        masters: what to write; the vision part is not trained here, so its configuration must have none.
        out: a new or empty folder.
        tokenizer: content of its `tokenizer.json`.

    Raises:
        UserError: the folder is not empty or not writable.
        CapacityError: the disk is full.
    """
    stored = StoredMasters(masters)

    def source(spec: TensorSpec) -> Iterator[NDArray[np.uint8]]:
        return tensor_bytes(stored.tensor(spec))

    with new_checkpoint(out) as checkpoint:
        checkpoint.write_tensors(expected_tensors(masters.config), source, max_shard_bytes=DEFAULT_SHARD_BYTES)
        if tokenizer is not None:
            checkpoint.write_bytes("tokenizer.json", tokenizer)
        checkpoint.write_json("config.json", to_json(masters.config))
