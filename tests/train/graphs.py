"""Small training graphs for tests: masters in which every mechanism is at work, documents, losses and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.memory.addressing import Addressing
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.text.synthetic import make_tokenizer, tokenizer_bytes
from headrace.train.data.packing import IGNORE
from headrace.train.export import export_masters
from headrace.train.graph import Document, GraphOptions, GraphOutput, TrainGraph
from headrace.train.losses import CrossEntropy, cross_entropy
from headrace.train.masters import Masters, init_masters
from headrace.train.quantise import QuantPlan
from tests.factories import tiny_config

# The widths of `tiny_config` cut down to what its rules allow; all roles, ratios and the pool stay.
MICRO: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 32,
    "o_lora_rank": 16,
    "n_routed_experts": 4,
    "swiglu_limit": 1.5,
}


def micro_config(streams: int = 3, *, engram: bool = True, **text: Any) -> Config:
    """Return a text model of 7 layers, 32 wide; some of its expert activations are clamped."""
    if "compress_ratios" in text:
        text["compress_ratios"] = text["compress_ratios"][:7]  # those of draft layers follow
    return tiny_config(streams, vision=False, draft=False, engram=engram, **{**MICRO, **text})


def lively_masters(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Masters:
    """Return masters whose norms, sinks, mixes and routing biases are far from their first values."""
    masters = init_masters(config, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    for name, parameter in masters.parameters.items():
        if name.endswith("_scale"):
            changed = 0.4 + 0.1 * noise(parameter)
        elif parameter.dim() == 1 or name.endswith(("engram.q_weight", "engram.k_weight")):
            changed = parameter + 0.3 * noise(parameter)
        else:
            changed = parameter.data
        masters.parameters[name] = nn.Parameter(changed.detach().to(dtype))
    buffers = {name: (0.1 * noise(buffer)).to(buffer.dtype) for name, buffer in masters.buffers.items()}
    return Masters(config, masters.parameters, buffers)


def own_addressing(config: Config) -> Addressing | None:
    """Return n-gram addressing with a token map of its own."""
    engram = config.engram
    if engram is None:
        return None
    return Addressing(
        engram.layer_ids,
        engram.num_embeddings,
        engram.max_ngram,
        engram.first_prime_above,
        engram.num_hashes,
        engram.pad_token_id,
        engram.compressed_vocab_size,
        np.arange(config.vocab_size) % engram.compressed_vocab_size,
    )


def lively_graph(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> TrainGraph:
    """Return a graph over `lively_masters`."""
    return TrainGraph(lively_masters(config, seed, dtype), own_addressing(config))


def token_ids(count: int, seed: int = 0, low: int = 0, high: int = 256) -> np.ndarray:
    """Return random token ids from `low` to `high` - 1."""
    return np.random.default_rng(seed).integers(low, high, count)


def next_tokens(documents: Sequence[Document]) -> Tensor:
    """Return the labels of the decoder's rows: the token after each, none after a document's last."""
    labels = []
    for document in documents:
        shifted = np.append(document.token_ids[1:], IGNORE)
        parts = document.segments or ()
        labels += [shifted] if not parts else [shifted[part.low : part.high] for part in parts]
    return torch.from_numpy(np.concatenate(labels))


@dataclass
class Pass:
    """One pass: its output, cross-entropy, and gradients by parameter."""

    output: GraphOutput
    judged: CrossEntropy
    gradients: dict[str, Tensor]


def run_pass(
    graph: TrainGraph,
    documents: Sequence[Document],
    options: GraphOptions,
    labels: Tensor | None = None,
    router: Any = None,
) -> Pass:
    """Run documents forwards and the sum of their losses backwards."""
    output = graph.forward(documents, options, router)
    judged = cross_entropy(output.hidden_TD, output.head, next_tokens(documents) if labels is None else labels)
    return Pass(output, judged, gradients_of(judged.numerator, graph))


def gradients_of(loss: Tensor, graph: TrainGraph) -> dict[str, Tensor]:
    """Return the gradients of a loss, of the parameters it reaches; may be asked again."""
    parameters = graph.masters.parameters
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


EXACT = GraphOptions(dtype=torch.float64)
SERVED = {dtype: GraphOptions(dtype=dtype, quant=QuantPlan.everything()) for dtype in (torch.bfloat16, torch.float32)}


def served_pair(
    graph_config: Config, folder: Path, dtype: torch.dtype, seed: int = 0
) -> tuple[TrainGraph, DeepseekV41]:
    """Return a training graph and the model that serves its exported masters, in the same numerics."""
    masters = lively_masters(graph_config, seed)
    classes = graph_config.engram.compressed_vocab_size if graph_config.engram else None
    export_masters(masters, folder / "out", tokenizer_bytes(make_tokenizer(graph_config.vocab_size, classes, {})))
    model = load_model(folder / "out", LoadOptions(numerics=Numerics(dtype=dtype))).model
    return TrainGraph(masters, model.addressing), model


def with_quant(options: GraphOptions, **flags: bool) -> GraphOptions:
    """Return options with some quantisers switched."""
    return replace(options, quant=replace(options.quant, **flags))
