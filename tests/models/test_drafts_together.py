"""Drafts under every numerics: a block's bits depend on its own sequence only, and native kernels keep no copies."""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.shipped import SHIPPED_MODEL
from headrace.kernels.native.library import available, why_absent
from headrace.kernels.native.tiles import Matrix
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.draft import Block, Drafter
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from tests.kernels.rows import bits, threads
from tests.traces import KERNELS

LENGTHS = (3, 150, 300)
needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")


@cache
def model(kernels: str) -> DeepseekV41:
    return load_model(SHIPPED_MODEL, LoadOptions(has_draft=True, numerics=Numerics(kernels=kernels))).model


@cache
def taps(kernels: str, length: int) -> Tensor:
    one = model(kernels)
    ids = np.random.default_rng(length).integers(5, 4000, length)
    found = one.forward([Span(one.new_state(), ids, length)], wants_taps=True).taps
    assert found is not None
    return found


def drafter(kernels: str) -> Drafter:
    one = model(kernels)
    return Drafter(one.config, one.parameters, one.frequencies.plain)


def observed(kernels: str, length: int, chunk: int) -> SequenceState:
    state, rows = model(kernels).new_state(), taps(kernels, length)
    for low in range(0, length, chunk):
        drafter(kernels).observe(state, low, rows[low : low + chunk])
    return state


def same(one: Block, other: Block) -> bool:
    return torch.equal(bits(one.logits_XV), bits(other.logits_XV)) and torch.equal(one.hidden_XD, other.hidden_XD)


@pytest.mark.parametrize("kernels", KERNELS)
def test_blocks_have_the_bits_they_have_alone(kernels: str) -> None:
    wanted = [(observed(kernels, length, length), 7 * place) for place, length in enumerate(LENGTHS)]
    together = drafter(kernels).blocks(wanted)
    for pair, block in zip(wanted, together, strict=True):
        assert same(drafter(kernels).blocks([pair])[0], block)
    with threads(2):
        assert all(map(same, drafter(kernels).blocks(wanted), together))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_context_is_the_same_wherever_chunks_begin(kernels: str, chunk: int) -> None:
    found, wanted = observed(kernels, 300, chunk), observed(kernels, 300, 300)
    for ring, other in zip(found.draft_rings, wanted.draft_rings, strict=True):
        assert (ring.oldest, ring.end) == (other.oldest, other.end)
        assert all(map(torch.equal, ring.stored_bytes, other.stored_bytes))


@needs_kernels
def test_kernels_draft_what_pytorch_drafts_but_for_the_order_of_sums() -> None:
    rows = taps("torch", 150)
    found = []
    for kernels in ("torch", "native"):
        state = model(kernels).new_state()
        drafter(kernels).observe(state, 0, rows)
        found.append(drafter(kernels).propose(state, 11))
    torch.testing.assert_close(found[1].logits, found[0].logits, rtol=0, atol=0.15)
    torch.testing.assert_close(found[1].confidence, found[0].confidence, rtol=0, atol=0.05)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Matrix):
        return []
    if isinstance(value, list | tuple):
        return [found for one in value for found in tensors(one)]
    if is_dataclass(value):
        return [found for one in fields(value) for found in tensors(getattr(value, one.name))]
    return []


@needs_kernels
def test_no_matrix_of_a_native_model_has_a_dense_copy() -> None:
    parameters = model("native").parameters
    draft = parameters.draft
    assert draft is not None and draft.tiled.main_proj is not None
    small = {parameters.embed.data_ptr(), draft.markov_embed.data_ptr()}
    small |= {mix.fn.data_ptr() for layer in parameters.layers for mix in (layer.attn_mix, layer.ffn_mix)}
    small |= {mix.fn.data_ptr() for layer in draft.layers for mix in (layer.attn_mix, layer.ffn_mix)}
    small |= {
        one.data_ptr()
        for layer in parameters.layers
        if layer.ngram
        for one in (layer.ngram.q_weight, layer.ngram.k_weight)
    }
    held = [parameters.head, *tensors(draft), *tensors(parameters.layers)]
    assert [list(one.shape) for one in held if one.dim() > 1 and one.data_ptr() not in small] == []
