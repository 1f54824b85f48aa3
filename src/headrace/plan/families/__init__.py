"""From a configuration to `Facts`: one reader per model family, chosen by `model_type`.

A reader takes the parsed document and how to name it in a refusal. A new family adds a module and a line here.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.core.errors import UserError
from headrace.core.strict_json import read_json
from headrace.models.deepseek_v41.config import MODEL_TYPE, config_path
from headrace.plan.facts import Facts
from headrace.plan.families import deepseek_v4, deepseek_v41, earlier, qwen4_exp
from headrace.plan.released import EARLIER, RELEASED, released_config

Reader = Callable[[dict[str, Any], str], Facts]
READERS = MappingProxyType[str, Reader](
    {
        MODEL_TYPE: deepseek_v41.read,
        deepseek_v4.MODEL_TYPE: deepseek_v4.read,
        qwen4_exp.MODEL_TYPE: qwen4_exp.read,
    }
)
_EARLIER = MappingProxyType[str, Reader]({"deepseek_v32": earlier.read_v32, "llama": earlier.read_grouped_queries})
_MAX_BYTES = 16 << 20


def read(document: Any, where: str) -> Facts:
    """Read a parsed configuration of any known family.

    Raises:
        UserError: it is no JSON object, of an unknown family, or its reader refuses it.
    """
    accepted = ", ".join(READERS)
    if not isinstance(document, dict):
        raise UserError(f"{where} is not a JSON object; a configuration of {accepted} is accepted.", param="model")
    model_type = document.get("model_type", MODEL_TYPE if "dim" in document else None)
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise UserError(f"{where}: model_type is {model_type!r}; the planner knows {accepted}.", param="model")
    return reader(document, where)


def read_model(model: str) -> Facts:
    """Read a released name, a checkpoint folder, or a configuration file. Weights are never read.

    Raises:
        UserError: there is no such model, or its configuration is refused.
    """
    if model.lower() in RELEASED:
        return released(model.lower())
    path = Path(model)
    if not path.exists():
        raise UserError(
            f"{model} is neither a released name nor there; {', '.join(RELEASED)}, a checkpoint folder and a "
            "config.json are accepted.",
            param="model",
        )
    file = config_path(path)
    return read(read_json(file, max_bytes=_MAX_BYTES), str(file))


@cache
def released(name: str) -> Facts:
    """Return the facts of a shipped configuration, earlier generations included."""
    document = released_config(name)
    reader = _EARLIER[document["model_type"]] if name in EARLIER else READERS[document["model_type"]]
    return reader(document, name)
