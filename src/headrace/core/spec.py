"""What a tensor of a checkpoint must look like: its name, shape and storage format."""

from dataclasses import dataclass
from math import prod

from headrace.core.formats import FORMATS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as a file must hold it.

    `dtype` is a safetensors name from `core.formats.FORMATS`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Stored elements; one for a scalar. A byte of packed FP4 counts once."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes the tensor takes in a file."""
        return self.num_elements * FORMATS[self.dtype].num_bytes
