import math

import pytest
import torch
from torch import Tensor

from headrace.kernels.ngram_gate import inject
from tests.kernels.number_formats import is_rounded_once, same_bits

NO_ROWS_DEAD = torch.zeros(5, dtype=torch.bool)
FLOAT32_NOISE = 1e-5  # relative to x and value, of two means, a dot product and a sigmoid


def formula(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return new streams and the size of what is added, loops over rows and streams, float64."""
    rows, count, width = x.shape
    out, size = torch.empty(x.shape, dtype=torch.float64), torch.empty(x.shape, dtype=torch.float64)
    for t in range(rows):
        value = kv[t, count * width :].double()
        for i in range(count):
            h, key = x[t, i].double(), kv[t, i * width : (i + 1) * width].double()
            norm = 1 / math.sqrt(float(h.square().mean()) + 1e-20) / math.sqrt(float(key.square().mean()) + 1e-20)
            dot = float((h * q_weight[i].double() * k_weight[i].double() * key).sum())
            delta = dot * norm / math.sqrt(width)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(delta), 1e-6)), delta)))
            out[t, i], size[t, i] = h + gate * value, h.abs() + value.abs()
    return out, size


@pytest.mark.parametrize(("count", "width"), [(1, 32), (3, 40), (4, 96)])
def test_every_stream_gets_the_value_through_its_own_gate(count: int, width: int) -> None:
    x, kv = torch.randn(5, count, width).bfloat16(), torch.randn(5, (count + 1) * width).bfloat16()
    q_weight, k_weight = torch.randn(count, width), torch.randn(count, width)
    want, size = formula(x, kv, q_weight, k_weight)
    got = inject(x, kv, q_weight, k_weight, NO_ROWS_DEAD, 1e-20)
    assert got.dtype == torch.bfloat16
    assert is_rounded_once(got, want, FLOAT32_NOISE * size)


@pytest.mark.parametrize(
    ("delta", "gate"),
    [
        (0.0, 0.50025),
        (1e-8, 0.50025),
        (-1e-8, 0.49975),
        (0.25, 0.622459),
        (-0.25, 0.377541),
        (4, 0.880797),
        (-4, 0.119203),
    ],
)
def test_gates_are_the_printed_ones(delta: float, gate: float) -> None:
    # ones have a mean square of 1; float64 streams stay float64, so that the gate itself can be read off
    x, kv = torch.ones(1, 1, 16, dtype=torch.float64), torch.ones(1, 32, dtype=torch.float64)
    weight = torch.full((1, 16), delta / 4, dtype=torch.float64)
    out = inject(x, kv, weight, torch.ones(1, 16, dtype=torch.float64), torch.tensor([False]), 1e-20)
    assert (out - 1)[0, 0].tolist() == pytest.approx([gate] * 16, abs=5e-7)


def test_dead_rows_come_back_to_the_last_bit() -> None:
    x, kv = torch.randn(5, 3, 32).bfloat16(), torch.randn(5, 128).bfloat16()
    x[1, 0, 0], kv[1] = -0.0, float("nan")
    dead = torch.tensor([False, True, False, True, False])
    weights = torch.randn(3, 32), torch.randn(3, 32)
    got = inject(x, kv, *weights, dead, 1e-20)
    assert same_bits(got[dead], x[dead])
    assert torch.equal(got[~dead], inject(x[~dead], kv[~dead], *weights, dead[~dead], 1e-20))
    assert (got[~dead] != x[~dead]).any(-1).all()


def test_a_mask_of_another_length_is_refused() -> None:
    # field report A9: one mark for five tokens must not be spread over all of them
    x, kv = torch.randn(5, 3, 32).bfloat16(), torch.randn(5, 128).bfloat16()
    with pytest.raises(RuntimeError):
        inject(x, kv, torch.randn(3, 32), torch.randn(3, 32), torch.tensor([True]), 1e-20)


def test_zero_streams_and_zero_keys_stay_finite() -> None:
    x, kv = torch.zeros(5, 3, 32).bfloat16(), torch.zeros(5, 128).bfloat16()
    kv[:, 96:] = 1
    got = inject(x, kv, torch.randn(3, 32), torch.randn(3, 32), NO_ROWS_DEAD, 1e-20)
    assert torch.equal(got, torch.full_like(got, 1 / (1 + math.exp(-1e-3))))


def test_inputs_are_left_alone_and_no_rows_give_no_rows() -> None:
    x, kv = torch.randn(5, 3, 32).bfloat16(), torch.randn(5, 128).bfloat16()
    before = x.clone(), kv.clone()
    inject(x, kv, torch.randn(3, 32), torch.randn(3, 32), NO_ROWS_DEAD, 1e-20)
    assert torch.equal(x, before[0])
    assert torch.equal(kv, before[1])
    empty = inject(x[:0], kv[:0], torch.randn(3, 32), torch.randn(3, 32), NO_ROWS_DEAD[:0], 1e-20)
    assert empty.shape == (0, 3, 32)
