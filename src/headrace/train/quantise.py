"""Weights and caches rounded to their stored formats during training, with gradients that pass straight through."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import block_quant
from headrace.kernels.block_quant import Quantiser, straight_through, unrounded

_FP8_FLOOR = 2.0**-120


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """Which quantisers act. Serving runs with all of them; early training with none.

    `inputs` Q8 inputs of products, `dense_weights` FP8, `expert_weights` FP4, `tables` FP8 rows, `window` FP8 window
    entries, `global_kv` FP4 entries, `index` FP4 index keys and queries.
    """

    inputs: bool = False
    dense_weights: bool = False
    expert_weights: bool = False
    tables: bool = False
    window: bool = False
    global_kv: bool = False
    index: bool = False

    @classmethod
    def everything(cls) -> "QuantPlan":
        """Return the plan that trains on what serving computes."""
        return cls(
            inputs=True,
            dense_weights=True,
            expert_weights=True,
            tables=True,
            window=True,
            global_kv=True,
            index=True,
        )


def encode_fp8_weight(weight_NK: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes uint8 [N, K] and E8M0 bytes [ceil(N / block), ceil(K / block)] of a dense matrix.

    Numerics: scale 2 ** ceil(log2(amax / 448)) per block, codes round half to even.
    """
    rows, columns = weight_NK.shape
    padded = torch.nn.functional.pad(weight_NK.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [n, block, k, block]
    exponent = _exponent(blocks.abs().amax((1, 3)), 1.0 / block_quant.E4M3_MAX)
    scaled = blocks * block_quant.power_of_two(254 - exponent)[:, None, :, None]
    codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), exponent.to(torch.uint8)


def encode_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed E2M1 codes uint8 [..., K / 2] and E8M0 bytes [..., K / 32] of expert matrices."""
    return block_quant.encode_q4i(weight.contiguous())


def encode_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes uint8 [rows, U] and E8M0 bytes [rows, U / 32] of n-gram table rows."""
    groups = table.float().unflatten(-1, (-1, 32))
    exponent = _exponent(groups.abs().amax(-1), 1.0 / block_quant.E4M3_MAX)
    scaled = groups * block_quant.power_of_two(254 - exponent).unsqueeze(-1)
    codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), exponent.to(torch.uint8)


def _exponent(amax: Tensor, factor: float) -> Tensor:
    return block_quant.ceil_exponent(amax.clamp_min(_FP8_FLOOR) * factor).clamp(1, 253)


def fake_fp8_weight(weight_NK: Tensor, block: int) -> Tensor:
    """Round a dense matrix to FP8 blocks; straight-through gradient, own dtype."""
    value = block_quant.decode_fp8_weight(*encode_fp8_weight(weight_NK.detach(), block), block)
    return straight_through(weight_NK, value.to(weight_NK.dtype))


def fake_fp4_weight(weight: Tensor) -> Tensor:
    """Round expert matrices [..., K] to FP4; straight-through gradient, own dtype."""
    value = block_quant.decode_q4i(*encode_fp4_weight(weight.detach()))
    return straight_through(weight, value.to(weight.dtype))


def fake_rows(rows: Tensor) -> Tensor:
    """Round looked-up table rows [..., U] to FP8; straight-through gradient, own dtype."""
    value = block_quant.decode_q8(*encode_rows(rows.detach()))
    return straight_through(rows, value.to(rows.dtype))


def choose(is_on: bool, quantiser: Quantiser) -> Quantiser:
    """Return the quantiser, or the one that does nothing."""
    return quantiser if is_on else unrounded
