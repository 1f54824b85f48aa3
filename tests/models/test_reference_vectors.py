"""The reference against the specification's test vectors, which use the released constants, and closed forms."""

import math

import pytest
import torch

from headrace.models.deepseek_v41.architecture import Engram, Yarn
from headrace.models.deepseek_v41.reference import arithmetic, engram, moe, rope, streams
from tests.golden_mini import config, golden

RELEASED = Engram(
    layer_ids=(1, 14),
    num_embeddings=(384006168, 384016682),
    max_ngram=4,
    first_prime_above=16000000,
    num_hashes=8,
    head_dim=256,
    pad_token_id=2,
    compressed_vocab_size=99092,
)
PRINTED = 6e-7  # the vectors are printed with seven digits

# specification section 7: row ids of the n-grams of compressed ids 50, 40, 30, 20, current token first
ROWS_1 = (
    "5457301 26470289 42926785 62582378 68079542 85915763 102834638 114358063 130605657 156377119 174550172 181396638 "
    "194477994 217026077 226856678 250510400 261515048 274655344 296704228 307730068 331081547 342108941 363969460 "
    "377395685"
)
ROWS_14 = (
    "12112771 17594806 40177035 60567362 78763383 80843792 100677074 126606474 142726201 145257379 175637107 180701399 "
    "198428675 221226053 227233095 255906954 259419700 284922264 302986529 306158514 323132060 342210866 353939203 "
    "380580960"
)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def sample() -> torch.Tensor:
    return torch.tensor([((37 * i) % 101 - 50) / 17 for i in range(32)]).bfloat16()


# ---------------------------------------------------------------------------------------------------- number formats


def test_window_quantiser_gives_the_printed_codes() -> None:
    groups = arithmetic.quantise_window(sample())
    assert groups.scales.tolist() == [2.0**-7]
    assert groups.dequantise()[:8].tolist() == [-3.0, -0.75, 1.375, -2.25, -0.171875, 2.0, -1.75, 0.40625]


def test_index_quantiser_gives_the_printed_codes_and_bytes() -> None:
    groups = arithmetic.quantise_index(sample())
    assert groups.scales.tolist() == [0.5]
    expected = [-3, -0.75, 1.5, -2, -0.25, 2, -2, 0.5, 3, -1, 1, -3, -0.5, 1.5, -2, 0]
    assert groups.dequantise()[:16].tolist() == expected
    packed = arithmetic.pack_codes(arithmetic.e2m1_codes(groups.values))
    assert packed[:8].tolist() == [191, 229, 105, 46, 199, 244, 90, 14]
    assert torch.equal(arithmetic.e2m1_values(arithmetic.unpack_codes(packed)), groups.values)


def test_entry_quantiser_gives_two_groups_of_sixteen_with_the_same_codes() -> None:
    groups = arithmetic.quantise_entry(sample())
    assert groups.scales.tolist() == [0.5, 0.5]
    assert torch.equal(groups.values, arithmetic.quantise_index(sample()).values)


def test_zero_groups_get_the_smallest_scale_and_stay_zero() -> None:
    zero = torch.zeros(32, dtype=torch.bfloat16)
    for quantise, smallest in (
        (arithmetic.quantise_window, 2.0**-22),
        (arithmetic.quantise_entry, 2.0**-9),
        (arithmetic.quantise_index, 2.0**-126),
    ):
        groups = quantise(zero)
        assert set(groups.scales.tolist()) == {smallest}
        assert groups.dequantise().count_nonzero() == 0


@pytest.mark.parametrize("name", ["quantise_window", "quantise_entry", "quantise_index"])
def test_quantising_twice_changes_nothing(name: str) -> None:
    quantise = getattr(arithmetic, name)
    x = (torch.randn(64, 96) * torch.logspace(-1, 2, 64)[:, None]).bfloat16()
    once = quantise(x).dequantise()
    assert torch.equal(quantise(once).dequantise(), once)


def test_a_maximum_rounded_down_to_half_range_gets_other_codes_for_the_same_numbers() -> None:
    x = torch.zeros(32).bfloat16()
    x[0] = 225.0
    once = arithmetic.quantise_window(x)
    twice = arithmetic.quantise_window(once.dequantise())
    assert (once.scales.item(), twice.scales.item()) == (1.0, 0.5)
    assert torch.equal(once.dequantise(), twice.dequantise())


def test_entries_of_tiny_groups_must_be_kept_as_codes() -> None:
    # the scale 2 x 2^-9 serves maxima down to 4.5 of it, which round to 4: the second time the scale is one step lower
    x = torch.full((16,), 9.5 * 2.0**-9).bfloat16()
    once = arithmetic.quantise_entry(x)
    twice = arithmetic.quantise_entry(once.dequantise())
    assert (once.scales.item(), twice.scales.item()) == (2.0**-8, 2.0**-9)
    assert not torch.equal(once.dequantise(), twice.dequantise())


def test_e2m1_rounds_midpoints_to_even_codes_and_keeps_signs() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert arithmetic.e2m1_codes(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert arithmetic.e2m1_codes(-midpoints).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert arithmetic.e2m1_codes(torch.tensor([100.0, -100.0, -0.1])).tolist() == [7, 15, 8]


def test_e2m1_rounds_every_number_to_a_nearest_value() -> None:
    x = torch.linspace(-7, 7, 4001)
    values = arithmetic.e2m1_values(arithmetic.e2m1_codes(x))
    table = torch.tensor([sign * m for sign in (1, -1) for m in arithmetic.E2M1_MAGNITUDES])
    nearest = (x[:, None] - table).abs().amin(dim=1)
    assert torch.equal((x - values).abs(), nearest)


def test_packed_bytes_are_read_low_nibble_first() -> None:
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    magnitudes = list(arithmetic.E2M1_MAGNITUDES)
    values = arithmetic.e2m1_values(arithmetic.unpack_codes(packed.view(torch.int8)))
    assert values.tolist() == magnitudes + [-m for m in magnitudes]


def test_power_of_two_scales_have_the_printed_bytes() -> None:
    scale = torch.tensor([0, 1, 105, 126, 127, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = arithmetic.e8m0_values(scale).tolist()
    assert values[:6] == [2.0**-127, 2.0**-126, 2.0**-22, 0.5, 1.0, 2.0**127]
    assert math.isnan(values[6])


def test_power_of_two_at_least_is_exact_around_powers() -> None:
    t = torch.tensor([1.0, math.nextafter(1.0, 2.0), 1.0 + 2**-23, 0.5, 0.75, 4.0, 5.0])
    assert arithmetic.power_of_two_at_least(t).tolist() == [1.0, 1.0, 2.0, 0.5, 1.0, 4.0, 8.0]


def test_e4m3_saturates_instead_of_overflowing() -> None:
    assert arithmetic.round_to_e4m3(torch.tensor([500.0, -1e6, 448.0])).float().tolist() == [448.0, -448.0, 448.0]


def test_weight_blocks_of_32_by_32_use_their_own_scale() -> None:
    weight = torch.randn(64, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e8m0fnu)
    numbers_ = arithmetic.dequantise_fp8(weight, scale)
    for i, j, factor in ((0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 8)):
        block = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
        assert torch.equal(numbers_[block], weight.float()[block] * factor)


def test_linear_inputs_are_quantised_for_quantised_weights_only() -> None:
    x = (torch.randn(3, 64) * 1.01).bfloat16()
    eye = torch.eye(64)
    stored = {
        "fp8.weight": eye.to(torch.float8_e4m3fn),
        "fp8.scale": torch.ones(2, 2).to(torch.float8_e8m0fnu),
        "fp4.weight": arithmetic.pack_codes(arithmetic.e2m1_codes(eye)).view(torch.int8),
        "fp4.scale": torch.ones(64, 2).to(torch.float8_e8m0fnu),
        "bf16.weight": eye.bfloat16(),
    }
    rounded = arithmetic.quantise_window(x).dequantise()
    assert not torch.equal(rounded, x)
    assert torch.equal(arithmetic.linear(stored, "fp8", x), rounded)
    assert torch.equal(arithmetic.linear(stored, "fp4", x), rounded)
    assert torch.equal(arithmetic.linear(stored, "bf16", x), x)


def test_norm_of_a_zero_vector_is_zero_even_with_a_tiny_epsilon() -> None:
    zero = torch.zeros(2, 32, dtype=torch.bfloat16)
    assert arithmetic.rms_norm(zero, torch.ones(32).bfloat16(), 1e-20).count_nonzero() == 0


# ------------------------------------------------------------------------------------------- rotation, streams, router


def test_plain_and_stretched_frequencies_are_the_printed_ones() -> None:
    plain = rope.base_frequencies(64, 10000.0)
    assert plain[:5].tolist() == pytest.approx([1, 0.7498942, 0.5623413, 0.4216965, 0.3162278], rel=PRINTED)
    yarn = Yarn(factor=16, beta_fast=32, beta_slow=1, original_positions=65536)
    stretched = rope.stretch(rope.base_frequencies(64, 160000.0), 64, 160000.0, yarn)
    expected = {1: 6.876560e-1, 14: 5.286857e-3, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 24: 1.953125e-5}
    for index, value in (expected | {25: 5.372312e-6, 31: 5.680529e-7}).items():
        assert float(stretched[index]) == pytest.approx(value, rel=PRINTED)


def test_layers_choose_their_frequencies_by_ratio() -> None:
    window_only, compressed = (rope.frequencies(config(), ratio) for ratio in (0, 1))
    assert torch.equal(compressed, rope.frequencies(config(), 2))
    assert not torch.equal(window_only, compressed)


def test_rotation_uses_neighbouring_pairs_at_the_end_of_the_vector() -> None:
    x = torch.tensor([[5.0, 7.0, 1.0, 0.0, 0.0, 2.0]]).bfloat16()
    turned = rope.rotate(x, torch.tensor([3]), torch.tensor([0.5, 0.25]))
    expected = [5, 7, math.cos(1.5), math.sin(1.5), -2 * math.sin(0.75), 2 * math.cos(0.75)]
    assert turned[0].tolist() == torch.tensor(expected).bfloat16().tolist()


def test_mix_coefficients_are_the_printed_ones() -> None:
    raw = torch.tensor([[0.1 * i - 1.1 for i in range(24)]])
    base = torch.tensor([0.05 * ((7 * i) % 11) - 0.2 for i in range(24)])
    mix = streams.coefficients(raw, torch.tensor([0.5, 0.25, 2.0]), base, config())
    assert mix.pre[0].tolist() == pytest.approx([0.3208223, 0.4133835, 0.3775417, 0.4750218], abs=PRINTED)
    assert mix.post[0].tolist() == pytest.approx([0.9625176, 0.8756470, 1.0624188, 0.9750053], abs=PRINTED)
    first, second = [0.224978, 0.293206, 0.256836, 0.224978], [0.256836, 0.193120, 0.293206, 0.256836]
    expected = [*first, *second, *first, 0.293206, 0.220467, 0.193120, 0.293206]
    assert mix.comb[0].flatten().tolist() == pytest.approx(expected, abs=PRINTED)


def test_mix_columns_sum_to_one() -> None:
    comb = streams.sinkhorn(torch.randn(100, 3, 3) * 3, 20, 1e-6)
    assert torch.allclose(comb.sum(dim=1), torch.ones(100, 3), atol=1e-5)


def test_router_scores_are_the_printed_ones() -> None:
    actual = moe.scores(torch.tensor([-3.0, 0.0, 2.0])).tolist()
    assert actual == pytest.approx([0.2204254, 0.8325546, 1.4583992], abs=PRINTED)


# ------------------------------------------------------------------------------------------------------ n-gram memory


def test_gate_has_the_printed_values_and_the_sign_of_its_input() -> None:
    gates = engram.gates(torch.tensor([0.0, 1e-8, -1e-8, 0.25, -0.25, 4.0, -4.0])).tolist()
    expected = [0.50025, 0.50025, 0.49975, 0.622459, 0.377541, 0.880797, 0.119203]
    assert gates == pytest.approx(expected, abs=PRINTED)


def test_multipliers_are_the_released_ones() -> None:
    assert engram.multipliers(1, RELEASED) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram.multipliers(14, RELEASED) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_primes_are_the_released_ones_and_add_up_to_the_table_sizes() -> None:
    table = engram.primes(RELEASED)
    assert table[0][0][:3] == [16000057, 16000079, 16000081]
    assert table[1][2][-1] == 16000889
    assert tuple(sum(sum(row) for row in layer) for layer in table) == RELEASED.num_embeddings


@pytest.mark.parametrize(
    ("ids", "layer", "expected"),
    [
        ([50, 40, 30, 20], 0, numbers(ROWS_1)),
        ([50, 40, 30, 20], 1, numbers(ROWS_14)),
        ([99091, 0, 12345, 2], 0, [13293893, 381123068]),
        ([99091, 0, 12345, 2], 1, [1723341, 383089261]),
    ],
)
def test_row_ids_are_the_printed_ones(ids: list[int], layer: int, expected: list[int]) -> None:
    factors = engram.multipliers(RELEASED.layer_ids[layer], RELEASED)
    rows = engram.row_ids(ids, factors, engram.primes(RELEASED)[layer])
    assert len(rows) == RELEASED.num_columns
    assert (rows if len(expected) > 2 else [rows[0], rows[-1]]) == expected


def test_hash_tables_of_the_golden_model_are_the_recorded_ones() -> None:
    settings = config().engram
    assert [engram.multipliers(i, settings) for i in settings.layer_ids] == golden()["engram_multipliers"].tolist()
    assert engram.primes(settings) == golden()["engram_primes"].tolist()
