"""Names and shapes of master parameters, derived from the checkpoint inventory: what a training model must hold."""

import re

from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.inventory import expected_tensors

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w\d)\.weight")


def master_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return parameter name -> dequantised shape; routed experts are stacked, scales and routing biases left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in expected_tensors(config):
        if spec.name.endswith((".scale", ".gate.bias", ".gate.bias_vl")):
            continue
        expert = _EXPERT.fullmatch(spec.name)
        if expert is None:
            shapes[spec.name] = spec.shape
            continue
        name = f"{expert[1]}.{expert[3]}"
        rows, packed = spec.shape
        shapes[name] = (shapes.get(name, (0,))[0] + 1, rows, 2 * packed)
    return shapes
