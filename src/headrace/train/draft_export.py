"""Writes a backbone and its draft in the official format: the backbone's bytes as they were, the draft encoded.

config.json, model.safetensors, tokenizer.json   the checkpoint
calibration.safetensors                          see `calibration.py`
draft.json                                       recipe, backbone, its hashes before and after, what was read
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.catalog import open_catalog
from headrace.checkpoint.reader import tensor_bytes
from headrace.checkpoint.stream import pieces
from headrace.checkpoint.writer import DEFAULT_SHARD_BYTES, new_checkpoint
from headrace.core.errors import UserError
from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config import to_json
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.text.tokenizer import FILE_NAME
from headrace.train.backbone import DRAFT_NAME, Backbone, files_digest
from headrace.train.calibration import CALIBRATION_NAME, Calibration, calibration_bytes
from headrace.train.export import StoredMasters
from headrace.train.masters import Masters

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a draft was trained on.

    `values_before` and `values_after` hash what the backbone computes with, before the first step and now;
    `files_before` its stored bytes.
    """

    recipe: str
    step: int
    backbone: str
    values_before: str
    values_after: str
    files_before: str
    data: Any


def export_draft(
    masters: Masters, backbone: Backbone, out: Path, proof: Proof, calibration: Calibration | None
) -> None:
    """Write the folder, whole or not at all.

    Args:
        masters: hold the draft; their other values were found unmoved.
        backbone: where every other tensor is copied from, vision tower included.
        out: a new or empty folder.
        proof: for `draft.json`.
        calibration: None writes no such file.

    Raises:
        UserError: the folder is not empty or not writable, or the backbone's files changed while the run went on.
        CapacityError: the disk is full.
    """
    stored = StoredMasters(masters)
    config = replace(masters.config, vision=backbone.stored.vision)

    def source(spec: TensorSpec) -> Iterable[NDArray[np.uint8]]:
        if spec.name.startswith("mtp."):
            return tensor_bytes(stored.tensor(spec))
        return pieces(backbone.catalog.tensors[spec.name])

    with new_checkpoint(out) as checkpoint:
        checkpoint.write_tensors(expected_tensors(config), source, max_shard_bytes=DEFAULT_SHARD_BYTES)
        after = files_digest(open_catalog(out))
        if after != proof.files_before:
            raise UserError(
                f"the files of the backbone {backbone.folder} changed: their hash was {proof.files_before} before the "
                f"first step and is {after} now; nothing was saved.",
                param="backbone",
            )
        if calibration is not None:
            checkpoint.write_bytes(CALIBRATION_NAME, calibration_bytes(calibration))
        if backbone.tokenizer is not None:
            checkpoint.write_bytes(FILE_NAME, backbone.tokenizer.encode())
        document = {
            "format": _FORMAT,
            "recipe": proof.recipe,
            "step": proof.step,
            "backbone": {
                "path": proof.backbone,
                "values_sha256": {"before": proof.values_before, "after": proof.values_after},
                "files_sha256": {"before": proof.files_before, "after": after},
            },
            "calibration": None if calibration is None else {"file": CALIBRATION_NAME, "rows": calibration.num_rows},
            "data": proof.data,
        }
        checkpoint.write_json(DRAFT_NAME, document)
        checkpoint.write_json("config.json", to_json(config))
