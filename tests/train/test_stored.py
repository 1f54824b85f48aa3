"""Masters read back from a checkpoint are what serving computes with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headrace.models.deepseek_v41.load import load_model
from headrace.train.dspark import backbone_digest
from headrace.train.export import export_masters
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.masters import init_masters
from headrace.train.quantise import QuantPlan
from headrace.train.stored import read_masters
from tests.factories import tiny_checkpoint, tiny_config


def test_stored_masters_give_the_logits_of_the_masters_they_came_from(tmp_path: Path) -> None:
    """N-gram tables, packed experts, draft and vision left out; rounding once more changes nothing."""
    stored = tiny_config(streams=3, vision=False)
    masters = init_masters(stored, 3)
    for buffer in masters.buffers.values():
        buffer.add_(torch.linspace(-0.3, 0.4, len(buffer)))
    tokenizer = (tiny_checkpoint(tmp_path, stored, 0) / "tokenizer.json").read_bytes()
    export_masters(masters, tmp_path / "out", tokenizer)
    wanted = replace(stored, draft=None, compress_ratios=stored.compress_ratios[: stored.num_layers])
    read = read_masters(tmp_path / "out", stored, wanted)
    assert set(read.parameters) == {name for name in masters.parameters if not name.startswith("mtp.")}
    assert not any(parameter.requires_grad for parameter in read.parameters.values())
    addressing = load_model(tmp_path / "out").model.addressing
    documents = [Document(np.random.default_rng(1).integers(0, stored.vocab_size, length)) for length in (19, 44)]
    everything = QuantPlan.everything()
    unrounded = replace(everything, dense_weights=False, expert_weights=False, tables=False)
    expected = TrainGraph(masters, addressing).forward(documents, GraphOptions(dtype=torch.bfloat16, quant=everything))
    for quant in (unrounded, everything):
        found = TrainGraph(read, addressing).forward(documents, GraphOptions(dtype=torch.bfloat16, quant=quant))
        assert torch.equal(found.logits(), expected.logits())


def test_vision_and_draft_stay_on_disk(tmp_path: Path) -> None:
    stored = tiny_config(streams=3)
    wanted = replace(stored, draft=None, vision=None, compress_ratios=stored.compress_ratios[: stored.num_layers])
    read = read_masters(tiny_checkpoint(tmp_path, stored, 0), stored, wanted)
    assert not [name for name in read.parameters if name.startswith(("mtp.", "vision.", "aligner.", "image_"))]
    assert backbone_digest(read) == backbone_digest(read_masters(tmp_path / "tiny", stored, wanted))
    read.buffers["layers.2.ffn.gate.bias"][0] += 1e-6
    assert backbone_digest(read) != backbone_digest(read_masters(tmp_path / "tiny", stored, wanted))
