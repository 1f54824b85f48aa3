"""The n-gram gate against its reference, bit for bit, on every instruction set."""

import torch

from headrace.kernels.native.library import load
from headrace.kernels.native.ngram import NgramGate, reference
from headrace.kernels.ngram_gate import inject
from tests.kernels.native.matrices import on_every_instruction_set
from tests.kernels.rows import bits


@on_every_instruction_set
def test_a_gate_is_its_reference(instruction_set: str) -> None:
    weights = torch.randn(4, 48), torch.randn(4, 48)
    x, kv = torch.randn(9, 4, 48).bfloat16(), torch.randn(9, 240).bfloat16()
    x[1], kv[2], x[3, 2] = 0, 0, x[3, 2] * 1e-18
    is_dead = torch.arange(9) == 5
    found = x.clone()
    NgramGate(load(instruction_set), *weights, eps=1e-20)(found, kv, is_dead)
    wanted = reference.inject(x, kv, weights, is_dead, 1e-20)
    assert torch.equal(bits(found), bits(wanted))
    assert torch.equal(found[5], x[5])
    torch.testing.assert_close(found, inject(x, kv, *weights, is_dead, 1e-20), rtol=2**-7, atol=1e-3)
    alone = x[4:5].clone()
    NgramGate(load(instruction_set), *weights, eps=1e-20)(alone, kv[4:5], is_dead[4:5])
    assert torch.equal(alone, found[4:5])
