"""Cases of products: every kind, odd and block-border sizes, zero rows, extreme scales, every code."""

from functools import partial

import torch
from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product, reference
from headrace.kernels.native.samples import KINDS, Samples
from headrace.kernels.native.tiles import BF16, FP4, FP8, Matrix, tile_fp4

_SIZES = ((1, 1, 32), (3, 16, 64), (11, 33, 96), (65, 47, 160), (4, 17, 1024))


def cases() -> list[Case]:
    """Return the cases."""
    samples, found = Samples(1), []
    for name, kind in KINDS.items():
        for count, rows, width in _SIZES:
            x, matrix = samples.rows(count, width, 20), samples.matrix(kind, rows, width)
            found += _products(f"{name} [{rows}, {width}], {count} rows", x, matrix)
        extreme = samples.normal(5, 64) * torch.tensor([1e-38, 1e-30, 1.0, 1e18, 0.0])[:, None]
        found += _products(f"{name}, extreme scales", extreme.bfloat16(), samples.matrix(kind, 20, 64, (1, 200)))
    packed = torch.arange(256, dtype=torch.uint8).repeat(4).view(64, 16)
    eye = torch.eye(32).bfloat16()
    found += _products("every FP4 code", eye, tile_fp4(packed, torch.full((64, 1), 127, dtype=torch.uint8)))
    found += _products("every FP8 code", eye, samples.matrix(FP8, 32, 32, (127, 128)))
    return found


def _products(name: str, x: Tensor, matrix: Matrix) -> list[Case]:
    kinds = {FP4: (True,), FP8: (True, False), BF16: (False,)}[matrix.kind]
    return [
        Case(
            f"{name}{', quantised' if quantised else ''}{', float32' if is_float else ''}",
            partial(_run, x, matrix, how),
            partial(_wanted, x, matrix, how),
        )
        for quantised in kinds
        for is_float in (False, True)
        for how in ({"is_quantised": quantised, "is_float": is_float},)
    ]


def _run(x: Tensor, matrix: Matrix, how: dict[str, bool], library: Library) -> list[Tensor]:
    product = Product(library, matrix, is_quantised=how["is_quantised"], is_float=how["is_float"])
    return [product(x)]


def _wanted(x: Tensor, matrix: Matrix, how: dict[str, bool]) -> list[Tensor]:
    return [reference.multiply(x, matrix, **how)]
