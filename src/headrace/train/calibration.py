"""Calibration data of a draft module: what it was sure of, and what the backbone then accepted.

`calibration.safetensors` beside the draft. R anchors of held-out documents that the backbone continued greedily, X
drafted tokens, rows in order of document and position:

    confidence [R, X] float32 or float16  raw logits of the confidence head, each after the drafts before it, as served
    accepted   [R, X] uint8               1 where this draft and all before it are the backbone's greedy choices
    document   [R] int64 or int32         index of the held-out document
    position   [R] int64 or int32         anchor: the draft's first token stands two behind it
    is_round   [R] uint8                  1 where greedy decoding with this draft would draft
    acceptance [R, X] float32             1 - total variation between draft and backbone, after the backbone's own
                                          choices; the chance of being accepted when both are sampled at temperature 1;
                                          may be left out

Sequential temperature scaling fits the cumulative products of sigmoid(confidence / T) to `accepted` of the rounds
(training.md section 7.3): these are the rows that serving sees, and behind a draft that was wrong the next ones are
accepted less often than at any anchor. Serving's confidences equal these, behind a wrong draft too.

`headrace train` writes every anchor of a few documents; `headrace calibrate --collect` writes the rounds of a text.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.checkpoint.tensor_file import read_tensors, tensors_bytes
from headrace.core.errors import UserError

CALIBRATION_NAME = "calibration.safetensors"
_WHOLE = (torch.int64, torch.int32)
_BLOCKS = {
    "confidence": (torch.float32, torch.float16),
    "accepted": (torch.uint8,),
    "acceptance": (torch.float32,),
}
_ROWS = {"document": _WHOLE, "position": _WHOLE, "is_round": (torch.uint8,)}
_OPTIONAL = frozenset({"acceptance"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The tensors of the file; see above."""

    confidence: Tensor
    accepted: Tensor
    document: Tensor
    position: Tensor
    is_round: Tensor
    acceptance: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Anchors."""
        return len(self.document)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def rounds(self) -> "Calibration":
        """The rows at which greedy decoding would draft."""
        chosen = self.is_round.bool()
        return Calibration(**{name: tensor[chosen] for name, tensor in self.tensors.items()})

    @property
    def compact(self) -> "Calibration":
        """The same in the smallest types of the file."""
        return replace(
            self,
            confidence=self.confidence.half(),
            document=self.document.int(),
            position=self.position.int(),
        )

    @classmethod
    def joined(cls, parts: list["Calibration"]) -> "Calibration":
        """Return several, at least one and all with the same tensors, as one."""
        return cls(**{name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})


def calibration_bytes(data: Calibration) -> bytes:
    """Return the content of the file."""
    return tensors_bytes({name: tensor.contiguous() for name, tensor in data.tensors.items()})


def read_calibration(folder: Path) -> Calibration:
    """Read the file beside a draft.

    Raises:
        UserError: it is missing or damaged, or a tensor of it is missing, unknown or of the wrong kind.
    """
    path = folder / CALIBRATION_NAME
    tensors = read_tensors(path)
    wanted = _BLOCKS | _ROWS
    if set(tensors) | _OPTIONAL != set(wanted):
        raise UserError(f"{path} holds {', '.join(sorted(tensors))}; {', '.join(sorted(wanted))} are accepted.")
    sizes = list(tensors["confidence"].shape)
    if len(sizes) != 2 or not sizes[1]:
        raise UserError(f"{path} has confidence {sizes}; two dimensions, anchors and drafts, are accepted.")
    rows = tensors["document"].shape[0] if tensors["document"].dim() else 0
    for name, tensor in tensors.items():
        dtypes = wanted[name]
        shape = tuple(tensors["confidence"].shape) if name in _BLOCKS else (rows,)
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or tensor.shape[:1] != (rows,):
            kinds = " or ".join(map(str, dtypes))
            raise UserError(
                f"{path} has {name} {list(tensor.shape)} {tensor.dtype}; {list(shape)} {kinds} is accepted."
            )
    if not torch.equal(tensors["accepted"], tensors["accepted"].cummin(1).values.clamp_max(1)):
        raise UserError(f"{path} has a draft that was accepted behind one that was not; a falling row is accepted.")
    return Calibration(**tensors)


def rounds(accepted_AX: np.ndarray, first: int = 0) -> np.ndarray:
    """Return [A] bool: the anchors at which greedy decoding would draft, of the anchors of one document in a row.

    A round emits what is accepted and one token of the backbone's own; the next one begins behind that.

    Args:
        accepted_AX: [A, X] of consecutive positions.
        first: index of the first round's anchor.
    """
    is_round = np.zeros(len(accepted_AX), dtype=bool)
    place = first
    while place < len(accepted_AX):
        is_round[place] = True
        place += int(accepted_AX[place].sum()) + 1
    return is_round
