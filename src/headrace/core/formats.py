"""Storage formats of tensors, by the names safetensors headers use for them.

Only formats that headrace reads or writes are listed; a header with any other name is refused. FP4 is not a format of
its own here: two E2M1 codes share one byte and the header calls that byte `I8`. Importing this module does not load
torch, so that reading headers stays quick.
"""

from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 32  # rows and columns per FP8 weight scale, columns per FP4 weight scale and per Engram row scale
E8M0_NAN = 255  # the one scale byte that stands for no number
E4M3_NAN = (0x7F, 0xFF)  # the two E4M3 codes that stand for no number


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One storage format: its safetensors name, bytes per element and the name of the torch dtype that holds it."""

    name: str
    num_bytes: int
    torch_name: str

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The torch dtype that holds elements of this format; loads torch."""
        dtype: torch.dtype = getattr(import_module("torch"), self.torch_name)
        return dtype


_ALL = (
    Format(name="F64", num_bytes=8, torch_name="float64"),
    Format(name="F32", num_bytes=4, torch_name="float32"),
    Format(name="F16", num_bytes=2, torch_name="float16"),
    Format(name="BF16", num_bytes=2, torch_name="bfloat16"),
    Format(name="F8_E4M3", num_bytes=1, torch_name="float8_e4m3fn"),
    Format(name="F8_E8M0", num_bytes=1, torch_name="float8_e8m0fnu"),
    Format(name="I64", num_bytes=8, torch_name="int64"),
    Format(name="I32", num_bytes=4, torch_name="int32"),
    Format(name="I16", num_bytes=2, torch_name="int16"),
    Format(name="I8", num_bytes=1, torch_name="int8"),
    Format(name="U8", num_bytes=1, torch_name="uint8"),
    Format(name="BOOL", num_bytes=1, torch_name="bool"),
)
FORMATS = MappingProxyType({entry.name: entry for entry in _ALL})
