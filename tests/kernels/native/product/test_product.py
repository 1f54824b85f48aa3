"""Products against their reference in the stated order, bit for bit, on every instruction set."""

import pytest
import torch

from headrace.core.errors import InternalError
from headrace.kernels.block_quant import decode_fp4_weight, decode_fp8_weight, fake_q8
from headrace.kernels.native.library import load
from headrace.kernels.native.product import Product, reference
from headrace.kernels.native.tiles import BF16, FP4, FP8, GROUP, Matrix, stored, tile_fp4, tile_fp8
from tests.kernels.native.matrices import KINDS, finite_codes, matrix, on_every_instruction_set
from tests.kernels.rows import bits, differences

QUANTISED = {FP4: (True,), FP8: (True, False), BF16: (False,)}


@on_every_instruction_set
@KINDS
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (16, 64), (33, 96), (47, 160)])
def test_a_product_is_its_reference(instruction_set: str, kind: int, rows: int, width: int) -> None:
    weights = matrix(kind, rows, width)
    x = (torch.randn(11, width) * torch.exp2(torch.randint(-20, 20, (11, 1)).float())).bfloat16()
    x[4] = 0
    for is_quantised in QUANTISED[kind]:
        for is_float in (False, True):
            run = Product(load(instruction_set), weights, is_quantised=is_quantised, is_float=is_float)
            wanted = reference.multiply(x, weights, is_quantised=is_quantised, is_float=is_float)
            assert torch.equal(bits(run(x)), bits(wanted))


@on_every_instruction_set
@KINDS
def test_extreme_scales_and_subnormals_agree(instruction_set: str, kind: int) -> None:
    weights = matrix(kind, 20, 64, scales=(0, 255))
    x = (torch.randn(5, 64) * torch.tensor([1e-38, 1e-30, 1.0, 1e25, 0.0])[:, None]).bfloat16()
    for is_quantised in QUANTISED[kind]:
        run = Product(load(instruction_set), weights, is_quantised=is_quantised, is_float=True)
        wanted = reference.multiply(x, weights, is_quantised=is_quantised, is_float=True)
        is_finite = wanted.isfinite()
        assert torch.equal(run(x)[is_finite], wanted[is_finite])


@on_every_instruction_set
@KINDS
def test_a_row_alone_has_the_bits_it_has_among_others(instruction_set: str, kind: int) -> None:
    weights = matrix(kind, 48, 128)
    run = Product(load(instruction_set), weights, is_quantised=kind != BF16)
    x = torch.randn(65, 128).bfloat16()
    assert differences(lambda rows: run(x[rows])) == []


@on_every_instruction_set
def test_every_code_is_decoded_exactly(instruction_set: str) -> None:
    library, eye = load(instruction_set), torch.eye(32).bfloat16()
    packed = torch.arange(256, dtype=torch.uint8).repeat(4).view(64, 16)
    scales = torch.full((64, 1), 127, dtype=torch.uint8)
    found = Product(library, tile_fp4(packed, scales), is_quantised=True, is_float=True)(eye)
    assert torch.equal(found.t(), decode_fp4_weight(packed, scales).float())
    codes, blocks = finite_codes(32, 32), torch.full((1, 1), 127, dtype=torch.uint8)
    codes.view(-1)[:254] = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    found = Product(library, tile_fp8(codes, blocks), is_quantised=True, is_float=True)(eye)
    assert torch.equal(found.t(), decode_fp8_weight(codes, blocks, GROUP).float())


@KINDS
def test_tiles_give_the_stored_bytes_back(kind: int) -> None:
    packed, factors = torch.randint(0, 256, (37, 48), dtype=torch.uint8), torch.zeros(37, 3, dtype=torch.uint8)
    if kind == FP4:
        found = stored(tile_fp4(packed, factors))
        assert torch.equal(found[0], packed) and found[1] is not None and torch.equal(found[1], factors)
    elif kind == FP8:
        codes = finite_codes(37, 96)
        assert torch.equal(stored(tile_fp8(codes, factors[:2]))[0], codes)
    else:
        assert stored(matrix(BF16, 37, 96))[0].shape == (37, 96)


@on_every_instruction_set
def test_a_product_is_close_to_a_plain_one(instruction_set: str) -> None:
    codes, blocks = finite_codes(48, 256), torch.randint(118, 126, (2, 8), dtype=torch.uint8)
    x = torch.randn(9, 256).bfloat16()
    found = Product(load(instruction_set), tile_fp8(codes, blocks), is_quantised=True, is_float=True)(x)
    wanted = fake_q8(x).double() @ decode_fp8_weight(codes, blocks, GROUP).double().t()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=float(wanted.abs().max()) * 1e-6)


@on_every_instruction_set
def test_a_row_of_another_width_is_refused(instruction_set: str) -> None:
    weights: Matrix = matrix(FP8, 32, 64)
    with pytest.raises(InternalError, match=r"bfloat16 \[T, 64\] is wanted"):
        Product(load(instruction_set), weights, is_quantised=True)(torch.zeros(1, 96).bfloat16())


@on_every_instruction_set
def test_several_matrices_take_neighbouring_columns(instruction_set: str) -> None:
    library, parts = load(instruction_set), [matrix(FP8, 32, 64) for _ in range(3)]
    x = torch.randn(5, 192).bfloat16()
    found = Product(library, parts, is_quantised=False)(x)
    apart = [
        Product(library, part, is_quantised=False)(piece) for part, piece in zip(parts, x.split(64, 1), strict=True)
    ]
    assert torch.equal(found, torch.cat(apart, 1))
