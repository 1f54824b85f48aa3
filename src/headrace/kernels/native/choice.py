"""Which operations native kernels do: parsed once, named in the numerics, explained by `headrace kernels`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from headrace.core.errors import UserError
from headrace.kernels.native.library import available, load, why_absent

OPERATIONS: Final = MappingProxyType(
    {
        "mhc": "hyper-connections: statistic, coefficients, Sinkhorn, collapse and norm; expansion",
        "ngram": "n-gram memory: key and value product, gate",
        "compress": "global entries and index keys: products, pooling, norms, FP4 rounding, store",
        "attention": "projections, window rows, index scores and top-k, gather, attention with a sink, output; taps",
        "experts": "router, routed FP4 experts, shared FP8 expert",
        "head": "last collapse and norm, vocabulary product; the draft's sequential head",
    }
)
"""Operations that native kernels can do, in the order of a layer; they are the draft module's too."""

VARIABLE: Final = "HEADRACE_KERNELS"
_VERSION: Final = 2
"""Of the native kernels' numerics: a change of an order of summation, or of what they do, is another version."""
_ACCEPTED = "accepted are torch, native, auto, and native: with operations between commas, as native:mhc,experts"


@dataclass(frozen=True)
class Choice:
    """What native kernels do: names of operations, and why the others are PyTorch's."""

    native: frozenset[str]
    reasons: Mapping[str, str]

    @property
    def id(self) -> str:
        """The choice in a form that `choose` reads; part of the numerics' name."""
        if not self.native:
            return "torch"
        if len(self.native) == len(OPERATIONS):
            return "native"
        return "native:" + ",".join(name for name in OPERATIONS if name in self.native)

    def without(self, reasons: Mapping[str, str]) -> "Choice":
        """Return the choice without the operations that are named with a reason."""
        return replace(self, native=self.native - reasons.keys(), reasons={**self.reasons, **reasons})


def wanted_kernels(given: str | None) -> str:
    """Return what was asked for: the option, else the environment's variable, else PyTorch."""
    return given or os.environ.get(VARIABLE) or "torch"


def choose(wanted: str) -> Choice:
    """Read a choice.

    Raises:
        UserError: it is not a choice, or native kernels are asked for by name and there are none.
    """
    kind, _, listed = wanted.partition(":")
    names = [name.strip() for name in listed.split(",") if name.strip()] if listed else []
    if kind not in ("torch", "native", "auto") or (listed and kind != "native") or wanted.endswith(":"):
        raise UserError(f"kernels are {wanted!r}; {_ACCEPTED}", param="kernels")
    for name in names:
        if name not in OPERATIONS:
            raise UserError(f"operation {name!r} has no native kernel; {', '.join(OPERATIONS)} have", param="kernels")
    if kind == "torch":
        return Choice(frozenset(), dict.fromkeys(OPERATIONS, "PyTorch was asked for"))
    absent = why_absent()
    if kind == "auto" and absent is None and available()[-1] != "avx512":
        absent = "without AVX-512 BF16 prefill on the kernels can be slower than PyTorch's"
    if kind == "auto" and absent is not None:
        return Choice(frozenset(), dict.fromkeys(OPERATIONS, absent))
    load()  # says why not
    native = frozenset(names or OPERATIONS)
    return Choice(native, {name: "not among the operations asked for" for name in OPERATIONS if name not in native})


def numerics_name(kernels: str, *, index: str = "bf16", activations: str = "") -> str:
    """Return the identity of a model's numerics; answers are the same bits only for the same name.

    Args:
        kernels: id of the choice.
        index: dtype of index scores.
        activations: dtype of activations where it is not bfloat16, else empty.
    """
    version = 1 if kernels == "torch" and not activations else _VERSION
    return f"{kernels}-{index}idx{f'-{activations}' if activations else ''}-{version}"
