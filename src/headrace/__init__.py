"""headrace: DeepSeek-V4.1-Flash from a checkpoint in the official format to text.

Public names are resolved on first use, so that importing the package loads neither torch nor the model code. Read
ARCHITECTURE.md first.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ImagePrompt": "headrace.engine.images",
    "LLM": "headrace.engine.llm",
    "SamplingParams": "headrace.engine.sampling.params",
    "Structured": "headrace.engine.sampling.spec",
}

__all__ = ["ImagePrompt", "LLM", "SamplingParams", "Structured", "__version__"]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use.

    Raises:
        AttributeError: `name` is not a public name of the package.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"headrace has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)
