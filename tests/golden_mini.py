"""The golden mini checkpoint for tests: where it lies, its tensors, and how results are compared with it."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.models.deepseek_v41.config import Config, load_config

FOLDER = Path(__file__).parent / "golden" / "deepseek_v41_mini"

# One rounding that falls the other way moves one row by up to a few per cent and no other; sums in another order do
# that in a few rows of hundreds. A wrong equation moves all rows.
ROW_TOLERANCE = 2e-3
WHOLE_TOLERANCE = 1e-2


@cache
def config() -> Config:
    """Return the configuration of the golden checkpoint."""
    return load_config(FOLDER / "config.json")


@cache
def weights() -> dict[str, Tensor]:
    """Return its tensors under official names, in stored dtype; shared between tests, so never changed."""
    return load_file(FOLDER / "model.safetensors")


@cache
def golden() -> dict[str, Tensor]:
    """Return everything the vendor's code computed; shared between tests, so never changed."""
    return load_file(FOLDER / "golden.safetensors")


def run(prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one recorded run, without its prefix (`text.`, `text_fp32idx.`, `image.`, ...)."""
    return {name.removeprefix(prefix): tensor for name, tensor in golden().items() if name.startswith(prefix)}


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the relative L2 error of every row of [1, N, ...] tensors, as [N] float64."""
    difference = (actual[0].double() - expected[0].double()).flatten(1)
    return difference.norm(dim=1) / expected[0].double().flatten(1).norm(dim=1).clamp(min=1e-30)


def whole_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error of a whole tensor."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def mismatch(name: str, actual: Tensor, expected: Tensor, whole: float = WHOLE_TOLERANCE) -> str | None:
    """Say how a tensor [1, N, ...] differs from the recorded one, or return None where it agrees.

    Integers must be identical. Floats must be within ROW_TOLERANCE in all rows but max(3, 3 %), and `whole` together.
    """
    if actual.shape != expected.shape:
        return f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        different = int((actual.to(expected.dtype) != expected).sum())
        return f"{name}: {different} of {expected.numel()} numbers differ" if different else None
    if not torch.isfinite(actual).all():
        return f"{name}: not finite"
    errors = row_errors(actual, expected)
    off, allowed = int((errors > ROW_TOLERANCE).sum()), max(3, 3 * len(errors) // 100)
    total = whole_error(actual, expected)
    if off > allowed or total > whole:
        return f"{name}: {off} of {len(errors)} rows off (at most {allowed}), whole {total:.2e} (at most {whole:.0e})"
    return None
