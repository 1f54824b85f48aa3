"""Master parameters of a training model: what the optimizer moves, by official names.

Matrices have their logical shapes [out, in]; the routed experts of a layer are stacked. Routing biases are buffers,
not parameters. Read `graph.py` next.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.inventory import expected_tensors

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")
_BIAS = re.compile(r".*\.ffn\.gate\.bias(_vl)?$")
_VISION = ("vision.", "aligner.", "image_")


@dataclass
class Masters:
    """All master tensors of one model: `parameters` have gradients, `buffers` are the routing biases."""

    config: Config
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]

    def layer_names(self, prefix: str) -> list[str]:
        """Return the parameters under a prefix such as `layers.3.`."""
        return [name for name in self.parameters if name.startswith(prefix)]


def master_shapes(config: Config) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of all parameters and of all buffers of the text model, in checkpoint order."""
    parameters: dict[str, tuple[int, ...]] = {}
    buffers: dict[str, tuple[int, ...]] = {}
    for spec in expected_tensors(config):
        if spec.name.startswith(_VISION) or spec.name.endswith(".scale"):
            continue
        expert = _EXPERT.match(spec.name)
        if expert:
            name = f"{expert[1]}.{expert[3]}"
            count = int(expert[2]) + 1
            rows, packed = spec.shape
            parameters[name] = (count, rows, 2 * packed)
        elif _BIAS.match(spec.name):
            buffers[spec.name] = spec.shape
        else:
            parameters[spec.name] = spec.shape
    return parameters, buffers


def init_masters(
    config: Config,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    embedding_deviation: float = 0.5,
    prefix: str = "",
) -> Masters:
    """Return freshly initialised masters, those under a prefix alone; the same seed gives the same bits.

    Matrices are Gaussian with deviation 1 / sqrt(fan-in), norms are 1, sinks 0. A half starts as a plain residual
    layer: it collapses the streams to their mean, adds its output to each, and hardly mixes them. Nothing depends on
    the scale of the embedding but how fast it turns against a given rate.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes, buffer_shapes = master_shapes(config)
    parameters = {
        name: nn.Parameter(_initial(name, shape, config, generator).to(dtype))
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    with torch.no_grad():
        if "embed.weight" in parameters:
            parameters["embed.weight"].mul_(embedding_deviation)
    buffers = {name: torch.zeros(shape) for name, shape in buffer_shapes.items() if name.startswith(prefix)}
    return Masters(config, parameters, buffers)


def _initial(name: str, shape: tuple[int, ...], config: Config, generator: torch.Generator) -> Tensor:
    if name.endswith(("_base", "_scale")):
        return _initial_mix(name, shape, config.num_streams)
    if name.endswith("attn_sink"):
        return torch.zeros(shape)
    if len(shape) == 1 or name.endswith((".engram.q_weight", ".engram.k_weight")):
        return torch.ones(shape)
    values = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return values
    if name.endswith("markov_head.embed.weight"):
        return values * 0.5
    if name.endswith("engram.embed.weight"):
        return values * 0.1
    return values / math.sqrt(shape[-1])


def _initial_mix(name: str, shape: tuple[int, ...], num_streams: int) -> Tensor:
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    base = torch.zeros(shape)
    base[:num_streams] = -math.log(max(num_streams - 1, 1e-3)) if num_streams > 1 else 4.0
    base[2 * num_streams :] = (3.0 * torch.eye(num_streams)).flatten()
    return base
