"""Write random checkpoints of any configuration in the official format.

The result loads like a released checkpoint: every tensor of `inventory.py`, a configuration, and a tokenizer whose
token map has the classes the configuration names. Numbers come from `synth_numbers.py`, words from
`text/synthetic.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.writer import DEFAULT_SHARD_BYTES, new_checkpoint
from headrace.core.errors import UserError
from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.config import Config, to_json
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.synth_numbers import Draw
from headrace.text.synthetic import make_tokenizer, tokenizer_bytes

_MAX_SEED = 2**64 - 1


def write_checkpoint(
    config: Config,
    out: Path,
    *,
    seed: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a random checkpoint; the same configuration and seed give the same bytes.

    Args:
        config: what to write.
        out: a new or empty folder.
        seed: 0 to 2**64 - 1.
        max_shard_bytes: data per file; with more than that the checkpoint is sharded.
        progress: called with the number of bytes written since its last call.

    Raises:
        UserError: the seed is out of range, or the folder is not empty or cannot be written to.
        CapacityError: the disk is full.

    State: nothing is left in `out` unless all of it could be written; `config.json` comes last.
    """
    if not 0 <= seed <= _MAX_SEED:
        raise UserError(f"the seed is {seed}; 0 to {_MAX_SEED} are accepted.", param="seed")
    specs = {spec.name: spec for spec in expected_tensors(config)}

    def source(spec: TensorSpec) -> Iterator[NDArray[np.uint8]]:
        for piece in Draw(seed, spec.name).pieces(spec, _num_inputs(specs, spec)):
            yield piece
            if progress:
                progress(piece.nbytes)

    tokenizer = tokenizer_bytes(make_tokenizer(config.vocab_size, _num_classes(config), _special_ids(config)))
    with new_checkpoint(out) as checkpoint:
        checkpoint.write_tensors(specs.values(), source, max_shard_bytes=max_shard_bytes)
        checkpoint.write_bytes("tokenizer.json", tokenizer)
        checkpoint.write_json("config.json", to_json(config))


def _num_inputs(specs: dict[str, TensorSpec], spec: TensorSpec) -> int:
    """The width of the input a tensor, or the weight of a scale, is multiplied with."""
    weight = specs[f"{spec.name.removesuffix('.scale')}.weight"] if spec.name.endswith(".scale") else spec
    return weight.shape[-1] * (2 if weight.dtype == "I8" else 1)


def _num_classes(config: Config) -> int | None:
    return config.engram.compressed_vocab_size if config.engram else None


def _special_ids(config: Config) -> dict[str, int]:
    wanted = {
        "<｜deepseek_image｜>": config.image_token_id,
        "<｜end▁of▁sentence｜>": config.eos_token_id,
        "<｜begin▁of▁sentence｜>": config.bos_token_id,
        "<｜▁pad▁｜>": config.pad_token_id,
    }
    return {token: token_id for token, token_id in wanted.items() if token_id is not None}
