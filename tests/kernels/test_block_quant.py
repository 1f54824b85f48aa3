"""The three quantisers and the stored formats against their definition, over every number they can meet."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import block_quant as bq
from tests.kernels import number_formats as nf


class Quantiser(NamedTuple):
    group: int
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
    define: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
    is_packed: bool


QUANTISERS = {
    "q8": Quantiser(32, bq.encode_q8, bq.decode_q8, nf.q8, False),
    "q4k": Quantiser(16, bq.encode_q4k, bq.decode_q4k, nf.q4k, True),
    "q4i": Quantiser(32, bq.encode_q4i, bq.decode_q4i, nf.q4i, True),
}


@pytest.fixture(params=list(QUANTISERS))
def quantiser(request: pytest.FixtureRequest) -> Quantiser:
    return QUANTISERS[request.param]


def check(quantiser: Quantiser, groups: Tensor) -> None:
    """Compare scale bytes, codes and decoded values of bfloat16 groups [n, group] with the definition."""
    scale_bytes, codes, values = quantiser.define(groups.double().numpy())
    stored, scales = quantiser.encode(groups)
    assert stored.dtype == scales.dtype == torch.uint8
    assert np.array_equal(scales.squeeze(-1).numpy(), scale_bytes)
    assert np.array_equal(nf.unpack(stored) if quantiser.is_packed else stored.numpy(), codes)
    assert nf.same_bits(quantiser.decode(stored, scales), torch.from_numpy(values).bfloat16())


def anchored(elements: Tensor, anchor: float, group: int) -> Tensor:
    """Lay elements out in groups whose first element is the anchor, so that it sets the scale."""
    kept = elements[elements.abs() <= anchor]
    kept = torch.cat([kept, kept.new_zeros(-len(kept) % (group - 1))]).view(-1, group - 1)
    return torch.cat([kept.new_full((len(kept), 1), anchor), kept], 1)


def test_every_largest_element_gives_the_defined_scale(quantiser: Quantiser) -> None:
    largest = nf.magnitudes_bf16()
    groups = torch.zeros((len(largest), quantiser.group), dtype=torch.bfloat16)
    groups[torch.arange(len(largest)), torch.arange(len(largest)) % quantiser.group] = largest
    groups[1::2] *= -1  # the magnitude counts, wherever it stands; the other elements become -0
    check(quantiser, groups)


@pytest.mark.parametrize("anchor", [2.0**-126, 5e-5, 2.0**-9, 0.0167, 1.0, 6.0, 448.0, 2688.0, 3000.0, 3.3e38])
def test_every_element_rounds_to_the_nearest_code(quantiser: Quantiser, anchor: float) -> None:
    check(quantiser, anchored(nf.finite_bf16(), float(torch.tensor(anchor).bfloat16()), quantiser.group))


def test_every_mantissa_meets_every_scale_mantissa(quantiser: Quantiser) -> None:
    elements = nf.finite_bf16()
    elements = elements[(elements.abs() >= 2.0**-12) & (elements.abs() < 2.0)]
    for mantissa in range(128):
        check(quantiser, anchored(elements, 1 + mantissa / 128, quantiser.group))


def test_ties_go_to_the_even_code_and_zeros_keep_their_sign() -> None:
    # scale 1: the largest element is 6
    ties = torch.tensor(
        [[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0]]
    )
    expected = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 8]
    stored, scales = bq.encode_q4k(ties.bfloat16())
    assert nf.unpack(stored).tolist() == [expected]
    assert scales.tolist() == [[0x38]]
    stored, scales = bq.encode_q4i(torch.cat([ties, ties], 1).bfloat16())
    assert nf.unpack(stored).tolist() == [expected * 2]
    assert scales.tolist() == [[127]]
    eights = torch.tensor([[448, 17, 19, 17.0 / 16, -19.0 / 16, -0.0, 2.0**-10, 3 * 2.0**-10] + [0.0] * 24])
    decoded = bq.decode_q8(*bq.encode_q8(eights.bfloat16()))
    assert decoded[0, :8].tolist() == [448, 16, 20, 1, -1.25, 0, 0, 2.0**-8]
    assert torch.signbit(decoded[0, 5])


def test_groups_of_zeros_have_the_scale_bytes_of_the_floor() -> None:
    zeros = torch.zeros((1, 32), dtype=torch.bfloat16)
    assert bq.encode_q8(zeros)[1].tolist() == [[105]]
    assert bq.encode_q4k(zeros)[1].tolist() == [[1, 1]]
    assert bq.encode_q4i(zeros)[1].tolist() == [[1]]
    for quantiser in QUANTISERS.values():
        assert nf.same_bits(quantiser.decode(*quantiser.encode(zeros)), zeros)


def test_printed_vectors() -> None:
    # specification section 7
    x = torch.tensor([((37 * i) % 101 - 50) / 17 for i in range(32)]).bfloat16()
    codes, scales = bq.encode_q8(x)
    assert scales.tolist() == [127 - 7]
    assert bq.decode_q8(codes, scales)[:8].tolist() == [-3.0, -0.75, 1.375, -2.25, -0.171875, 2.0, -1.75, 0.40625]
    for encode, expected in ((bq.encode_q4i, [126]), (bq.encode_q4k, [48, 48])):
        packed, scales = encode(x)
        assert scales.tolist() == expected
        assert packed[:8].tolist() == [191, 229, 105, 46, 199, 244, 90, 14]


# ------------------------------------------------------------------------------------------------------------- twice


@pytest.mark.parametrize("name", ["q8", "q4i"])
def test_rounding_twice_changes_no_value(name: str) -> None:
    # bytes may: where the largest element rounds down to half of the range, the second scale is half as large
    quantiser = QUANTISERS[name]
    for anchor in nf.magnitudes_bf16()[:: 128 * 8].tolist():
        groups = anchored(nf.finite_bf16(), anchor, quantiser.group)
        once = quantiser.decode(*quantiser.encode(groups))
        assert nf.same_bits(quantiser.decode(*quantiser.encode(once)), once)
    largest = nf.magnitudes_bf16()
    largest = largest[largest < 2.0**127]  # larger ones may round up to a number that bfloat16 does not have
    groups = torch.stack([largest, -largest / 2, largest / 3, largest / 5] * (quantiser.group // 4), 1).bfloat16()
    once = quantiser.decode(*quantiser.encode(groups))
    assert nf.same_bits(quantiser.decode(*quantiser.encode(once)), once)


def test_rounding_global_entries_twice_changes_no_bit_above_the_subnormal_scales() -> None:
    largest = nf.magnitudes_bf16()
    largest = largest[largest >= 6 * 2.0**-6]
    groups = torch.stack([largest, -largest / 2, largest / 3, largest / 5] * 4, 1).bfloat16()
    packed, scales = bq.encode_q4k(groups)
    again = bq.encode_q4k(bq.decode_q4k(packed, scales))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)


def test_tiny_global_entries_change_when_rounded_twice() -> None:
    # 9 steps of 2**-9 / 6 round to a scale of 2 steps and code 4; 8 steps then round to a scale of 1 step, saturated:
    # this is why a store keeps the bytes of the first rounding and never makes them again from values
    entry = torch.full((1, 16), 9.05 * 2.0**-9).bfloat16()
    once = bq.decode_q4k(*bq.encode_q4k(entry))
    assert once[0, 0] == 8 * 2.0**-9
    assert bq.decode_q4k(*bq.encode_q4k(once))[0, 0] == 6 * 2.0**-9


# -------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("anchor", [2.0**-126, 5e-5, 0.0167, 1.0, 1.5, 448.0, 449.0, 3000.0, 2.0**107])
def test_arithmetic_rounding_equals_the_stored_format_for_every_element(anchor: float) -> None:
    groups = anchored(nf.finite_bf16(), float(torch.tensor(anchor).bfloat16()), 32)
    rounded = bq.fake_q8(groups)
    # numbers that round to zero come back as +0, whatever their sign
    assert nf.same_bits(rounded, bq.decode_q8(*bq.encode_q8(groups)) + 0.0)


def test_arithmetic_rounding_equals_the_stored_format_for_every_scale() -> None:
    largest = nf.magnitudes_bf16()
    largest = largest[largest < 2.0**108]
    groups = torch.stack([largest, -largest / 2, largest / 3, -largest / 5, largest / 700] * 6 + [largest] * 2, 1)
    assert nf.same_bits(bq.fake_q8(groups), bq.decode_q8(*bq.encode_q8(groups)) + 0.0)


def test_arithmetic_rounding_equals_the_stored_format_for_random_bits() -> None:
    bits = torch.randint(-32768, 32768, (4096, 64), dtype=torch.int16)
    x = bits.view(torch.bfloat16)
    x = torch.where(x.abs() < 2.0**108, x, 1.0)
    narrow = torch.randn(4096, 64).mul_(torch.logspace(-38, 30, 4096).unsqueeze(1)).bfloat16()
    for rows in (x, narrow):
        assert nf.same_bits(bq.fake_q8(rows), bq.decode_q8(*bq.encode_q8(rows)) + 0.0)
        assert nf.same_bits(bq.fake_q8(rows.view(64, 64, 64)).view(4096, 64), bq.fake_q8(rows))


@pytest.mark.parametrize("at_once", [1, 64, 100, 1000])
def test_rounding_in_pieces_changes_no_bit(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    for shape in ((11, 64), (64,), (3, 5, 32), (1, 96)):
        x = torch.randn(shape).bfloat16()
        whole = bq.fake_q8(x)
        with monkeypatch.context() as patch:
            patch.setattr(bq, "_ROUNDED_AT_ONCE", at_once)
            assert nf.same_bits(bq.fake_q8(x), whole)


def test_arithmetic_rounding_of_numbers_beyond_its_range_is_loud() -> None:
    x = torch.ones((1, 32), dtype=torch.bfloat16)
    x[0, 5] = 2.0**108
    assert bq.fake_q8(x)[0, 5].isnan()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_group_with_nan_or_infinity_never_comes_back_as_numbers(bad: float) -> None:
    x = torch.linspace(-1, 1, 64).bfloat16().view(1, 64)
    x[0, 40] = bad
    for spoiled in (bq.fake_q8(x), bq.decode_q8(*bq.encode_q8(x)), bq.decode_q4i(*bq.encode_q4i(x))):
        assert spoiled[0, :32].isfinite().all()
        assert not spoiled[0, 32:].isfinite().any()
    entry = bq.decode_q4k(*bq.encode_q4k(x))
    if np.isnan(bad):
        assert entry[0, 32:48].isnan().all()
    else:  # the format saturates
        assert entry[0, 40] == (2688 if bad > 0 else -2688)


# ------------------------------------------------------------------------------------------------------------ formats


def test_every_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = np.concatenate([nf.E4M3, [np.nan], -nf.E4M3, [np.nan]])
    for width in (2, 256, 1):  # pairs of bytes, and the path for odd widths
        values = bq.e4m3_values(codes.view(-1, width)).view(-1).double().numpy()
        assert np.array_equal(values, e4m3, equal_nan=True)
    assert torch.signbit(bq.e4m3_values(codes[128:130]))[0]
    e2m1 = np.concatenate([nf.E2M1, -nf.E2M1])
    pairs = torch.cartesian_prod(codes, codes).to(torch.uint8)
    expected = torch.from_numpy(e2m1[nf.unpack(pairs)]).bfloat16()
    assert nf.same_bits(bq.e2m1_values(pairs), expected)


def test_every_pair_of_fp8_bytes_keeps_its_order() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.cartesian_prod(codes, codes).to(torch.uint8)
    e4m3 = np.concatenate([nf.E4M3, [np.nan], -nf.E4M3, [np.nan]])
    assert np.array_equal(bq.e4m3_values(pairs).double().numpy(), e4m3[pairs.numpy()], equal_nan=True)


def test_nibbles_are_consecutive_elements_low_first() -> None:
    # field report A13: the other common layout reads the low nibbles as the first half
    stored = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert bq.e2m1_values(stored).tolist() == values + [-v for v in values]


def test_every_power_of_two_scale_has_its_value() -> None:
    stored = torch.arange(255, dtype=torch.uint8)
    assert bq.e8m0_values(stored).double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert not bq.e8m0_values(torch.tensor([255], dtype=torch.uint8)).isfinite()


def test_exponents_are_exact() -> None:
    t = nf.magnitudes_bf16().float()
    t = t[(t >= 2.0**-126) & (t <= 2.0**127)]
    t = torch.cat([t, torch.nextafter(t, torch.tensor(0.0))[1:], torch.nextafter(t, torch.tensor(1e38))[:-1]])
    exponent = bq.ceil_exponent(t)
    assert np.array_equal(exponent.numpy() - 127, nf.power_at_least(t.double().numpy()))
    inside = exponent[exponent <= 254]
    assert torch.equal(bq.power_of_two(inside).double(), torch.pow(2.0, inside.double() - 127))


# ------------------------------------------------------------------------------------------------------------ weights


def test_fp8_blocks_have_their_own_scale() -> None:
    # field report A11: four 32 x 32 blocks with the scales 1, 2, 4 and 8
    codes = torch.full((64, 64), 0x38, dtype=torch.uint8)
    scales = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    weight = bq.decode_fp8_weight(codes, scales, 32)
    assert [weight[row, column].item() for row in (0, 32) for column in (31, 32)] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("rows", "width", "block"), [(64, 96, 32), (50, 96, 32), (33, 40, 32), (1, 32, 32), (40, 24, 16)]
)
def test_fp8_weights_are_code_times_scale(rows: int, width: int, block: int) -> None:
    signs = torch.randint(0, 2, (rows, width), dtype=torch.uint8) << 7
    codes = torch.randint(0, 127, (rows, width), dtype=torch.uint8) | signs
    scales = torch.randint(100, 150, (-(-rows // block), -(-width // block)), dtype=torch.uint8)
    values = bq.e4m3_values(codes).double()
    expected = torch.stack(
        [
            torch.stack([values[n, k] * 2.0 ** (int(scales[n // block, k // block]) - 127) for k in range(width)])
            for n in range(rows)
        ]
    )
    assert torch.equal(bq.decode_fp8_weight(codes, scales, block).double(), expected)


def test_fp4_weights_have_one_scale_per_row_and_32_columns() -> None:
    packed = torch.randint(0, 256, (5, 48), dtype=torch.uint8)
    scales = torch.randint(0, 247, (5, 3), dtype=torch.uint8)
    codes = nf.unpack(packed)
    signed = np.concatenate([nf.E2M1, -nf.E2M1])
    expected = [[signed[codes[n, k]] * 2.0 ** (int(scales[n, k // 32]) - 127) for k in range(96)] for n in range(5)]
    assert bq.decode_fp4_weight(packed, scales).double().tolist() == expected


def test_encoding_leaves_its_input_alone_and_takes_any_leading_shape(quantiser: Quantiser) -> None:
    x = torch.randn(3, 5, 96).bfloat16()
    before = x.clone()
    stored, scales = quantiser.encode(x)
    assert torch.equal(x, before)
    assert stored.shape == (3, 5, 48 if quantiser.is_packed else 96)
    assert scales.shape == (3, 5, 96 // quantiser.group)
    kept = stored.clone(), scales.clone()
    decoded = quantiser.decode(stored, scales)
    assert torch.equal(stored, kept[0])
    assert torch.equal(scales, kept[1])
    assert torch.equal(decoded[1, 2], quantiser.decode(*quantiser.encode(x[1, 2])))
    assert quantiser.decode(*quantiser.encode(x[:0])).shape == (0, 5, 96)


def test_zero_rows_round_to_zero_rows() -> None:
    assert bq.fake_q8(torch.zeros((0, 64), dtype=torch.bfloat16)).shape == (0, 64)
