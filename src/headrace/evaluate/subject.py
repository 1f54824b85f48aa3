"""The checkpoint under judgement: as served, and as a graph in which caches can be left unrounded or denied."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from headrace.core.errors import CheckpointError, UserError
from headrace.memory.addressing import Addressing, Ids
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.text.bpe import Encoder
from headrace.text.tokenizer import FILE_NAME, Tokenizer
from headrace.train.graph import GraphOptions, TrainGraph
from headrace.train.masters import Masters
from headrace.train.quantise import QuantPlan
from headrace.train.stored import read_masters

# Stored weights have the values of their stored formats already; rounding them again would change nothing.
FP4_CACHES = QuantPlan(inputs=True, window=True, global_kv=True, index=True)
PLAIN_CACHES = QuantPlan(inputs=True)


@dataclass(frozen=True, eq=False)
class Subject:
    """A loaded checkpoint. Nothing here changes it.

    Attributes:
        path: its folder.
        model: the serving path, drafts included.
        masters: the weights of its text backbone, float32.
        tokenizer, encoder: its vocabulary.
    """

    path: Path
    model: DeepseekV41
    masters: Masters
    tokenizer: Tokenizer
    encoder: Encoder

    @property
    def config(self) -> Config:
        """The model's configuration, with its draft module."""
        return self.model.config

    def options(self, caches: QuantPlan = FP4_CACHES, *, has_records: bool = False) -> GraphOptions:
        """Return how to run a graph in the model's numerics."""
        numerics = self.model.numerics
        return GraphOptions(
            dtype=numerics.dtype, quant=caches, is_fp32_index=numerics.is_fp32_index, has_records=has_records
        )

    def graph(self) -> TrainGraph:
        """Return the model as it is."""
        return TrainGraph(self.masters, self.model.addressing)

    def window_only(self) -> TrainGraph:
        """Return the model with its global entries at zero: whatever it selects tells it nothing."""
        denied = {
            name: nn.Parameter(torch.zeros_like(value)) if name.endswith("compressor.norm.weight") else value
            for name, value in self.masters.parameters.items()
        }
        return TrainGraph(replace(self.masters, parameters=denied), self.model.addressing)

    def without_ngrams(self) -> TrainGraph:
        """Return the model whose n-gram memory adds nothing."""
        return TrainGraph(self.masters, None)

    def with_scrambled_ngrams(self, seed: int = 0) -> TrainGraph:
        """Return the model in which every token reads the n-gram rows of another token of its document."""
        addressing = self.model.addressing
        return TrainGraph(self.masters, None if addressing is None else ScrambledAddressing(addressing, seed))


class ScrambledAddressing(Addressing):
    """Addressing that gives every position the rows of a random other one: the same lookups, no information."""

    def __init__(self, addressing: Addressing, seed: int) -> None:
        """Take over all fields of an addressing."""
        self.__dict__.update(addressing.__dict__)
        self._seed = seed

    def row_ids(self, history: ArrayLike) -> Ids:
        """Return the rows of n-grams, [T, ...], dealt out anew: none stays where it was if there are two or more."""
        rows = super().row_ids(history)
        order = np.random.default_rng((self._seed, len(rows))).permutation(len(rows))
        dealt = np.empty_like(rows)
        dealt[order] = rows[np.roll(order, 1)]
        return dealt


def load_subject(path: Path) -> Subject:
    """Load a checkpoint to be judged.

    Args:
        path: a checkpoint folder with a tokenizer.

    Raises:
        UserError: the checkpoint is refused, or has no tokenizer.
    """
    loaded = load_model(path, LoadOptions(has_draft=True))
    if loaded.tokenizer is None:
        raise CheckpointError(f"{path / FILE_NAME} is missing; a model is judged on text, so it needs one.")
    if loaded.tokenizer.size > loaded.model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {path} has {loaded.tokenizer.size} tokens; the model's vocabulary of "
            f"{loaded.model.config.vocab_size} is accepted at most.",
            param="tokenizer",
        )
    stored = loaded.model.config
    backbone = replace(stored, draft=None, vision=None, compress_ratios=stored.compress_ratios[: stored.num_layers])
    masters = read_masters(path, stored, backbone)
    document = (path / FILE_NAME).read_text(encoding="utf-8")
    return Subject(path, loaded.model, masters, loaded.tokenizer, Encoder(document))
