"""Hold a checkpoint against the configuration: names, shapes, formats, and that every stored code is a number.

`check_catalog` needs headers only; `check_numbers` looks at the bytes of one tensor. Loading, saving and `inspect` use
both. Does not load torch.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.catalog import Catalog, TensorEntry
from headrace.checkpoint.nonfinite import describe, first_bad
from headrace.checkpoint.stream import pieces
from headrace.core.errors import CheckpointError
from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.architecture import Config
from headrace.models.deepseek_v41.inventory import expected_tensors


def check_catalog(catalog: Catalog, config: Config) -> None:
    """Check that a checkpoint holds exactly the tensors its configuration calls for.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has another format or shape than expected.
    """
    missing: list[str] = []
    known = set()
    for spec in expected_tensors(config):
        known.add(spec.name)
        entry = catalog.tensors.get(spec.name)
        if entry is None:
            missing.append(spec.name)
        elif entry.spec != spec:
            raise _mismatch(catalog, entry, spec)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"tensor {missing[0]}{more}, which the configuration calls for, is missing from {catalog.path}."
        )
    if unknown := [name for name in catalog.tensors if name not in known]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"{catalog.path} holds tensor {unknown[0]}{more}, which the configuration does not call for."
        )


def _mismatch(catalog: Catalog, entry: TensorEntry, spec: TensorSpec) -> CheckpointError:
    where = f"tensor {entry.name} in {entry.file}"
    if entry.dtype != spec.dtype:
        return CheckpointError(f"{where} has dtype {entry.dtype}; {spec.dtype} is expected.")
    why = ""
    if spec.dtype == "F8_E8M0":
        weight = catalog.tensors.get(f"{spec.name.removesuffix('.scale')}.weight")
        why = f" to scale a weight stored as {list(weight.shape)} {weight.dtype}" if weight else ""
    return CheckpointError(f"{where} has shape {list(entry.shape)}; {list(spec.shape)} is expected{why}.")


def check_numbers(entry: TensorEntry, parts: Iterable[NDArray[np.uint8]]) -> None:
    """Check that no element of a tensor is NaN or infinite.

    Args:
        entry: the tensor.
        parts: its bytes in order, in pieces of whole elements.

    Raises:
        CheckpointError: one is; the sentence names it by its place.
    """
    done = 0
    for part in parts:
        index = first_bad(part, entry.dtype)
        if index is not None:
            place = np.unravel_index(done + index, entry.shape) if entry.shape else ()
            where = ", ".join(str(int(axis)) for axis in place)
            raise CheckpointError(
                f"tensor {entry.name} in {entry.file} holds {describe(entry.dtype)} at [{where}]; finite numbers are "
                "accepted."
            )
        done += part.size // FORMATS[entry.dtype].num_bytes


def verify_catalog(catalog: Catalog, config: Config, progress: Callable[[int], object] | None = None) -> None:
    """Read a whole checkpoint, in pieces, and check every name, shape, format and number in it.

    Args:
        catalog: the checkpoint.
        config: what it should hold.
        progress: called with the number of bytes read since its last call.

    Raises:
        CheckpointError: anything is not as it should be.
    """
    check_catalog(catalog, config)
    for entry in sorted(catalog.tensors.values(), key=lambda entry: (entry.file, entry.offset)):
        check_numbers(entry, pieces(entry))
        if progress:
            progress(entry.nbytes)
