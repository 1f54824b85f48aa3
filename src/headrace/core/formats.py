"""Storage formats of tensors, by the names safetensors headers use for them.

Only formats that headrace reads or writes are listed; a header with any other name is refused. FP4 is not a format of
its own here: two E2M1 codes share one byte and the header calls that byte `I8`.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch

BLOCK = 32  # rows and columns per FP8 weight scale, columns per FP4 weight scale and per Engram row scale
E8M0_NAN = 255  # the one scale byte that stands for no number


@dataclass(frozen=True, kw_only=True)
class Format:
    """One storage format: its safetensors name, bytes per element and the torch dtype that holds it."""

    name: str
    num_bytes: int
    torch_dtype: torch.dtype


_ALL = (
    Format(name="F64", num_bytes=8, torch_dtype=torch.float64),
    Format(name="F32", num_bytes=4, torch_dtype=torch.float32),
    Format(name="F16", num_bytes=2, torch_dtype=torch.float16),
    Format(name="BF16", num_bytes=2, torch_dtype=torch.bfloat16),
    Format(name="F8_E4M3", num_bytes=1, torch_dtype=torch.float8_e4m3fn),
    Format(name="F8_E8M0", num_bytes=1, torch_dtype=torch.float8_e8m0fnu),
    Format(name="I64", num_bytes=8, torch_dtype=torch.int64),
    Format(name="I32", num_bytes=4, torch_dtype=torch.int32),
    Format(name="I16", num_bytes=2, torch_dtype=torch.int16),
    Format(name="I8", num_bytes=1, torch_dtype=torch.int8),
    Format(name="U8", num_bytes=1, torch_dtype=torch.uint8),
    Format(name="BOOL", num_bytes=1, torch_dtype=torch.bool),
)
FORMATS = MappingProxyType({entry.name: entry for entry in _ALL})
_BY_TORCH = MappingProxyType({entry.torch_dtype: entry for entry in _ALL})


def format_of(dtype: torch.dtype) -> Format:
    """Return the storage format that holds a torch dtype.

    Raises:
        KeyError: no listed format holds `dtype`.
    """
    return _BY_TORCH[dtype]
