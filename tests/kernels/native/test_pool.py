"""Threads of the kernels: they change no bit, also where several callers come at once."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels.native.experts import ExpertMatrices, Experts
from headrace.kernels.native.library import load, why_absent
from headrace.kernels.native.product import Product
from headrace.kernels.native.streams import Streams
from headrace.kernels.native.tiles import BF16, FP4, FP8
from tests.kernels.native.matrices import KINDS, matrix, on_every_instruction_set
from tests.kernels.rows import bits

SCALES = (120, 126)

pytestmark = pytest.mark.skipif(why_absent() is not None, reason=f"no native kernels: {why_absent()}")


@pytest.fixture(autouse=True)
def _one_thread_after() -> Iterator[None]:
    yield
    load().use_threads(1)


@on_every_instruction_set
@KINDS
@pytest.mark.parametrize("rows", [1, 37])
def test_threads_change_no_bit_of_a_product(instruction_set: str, kind: int, rows: int) -> None:
    library = load(instruction_set)
    run = Product(library, matrix(kind, 1040, 512), is_quantised=kind != BF16)
    x = torch.randn(rows, 512).bfloat16()
    wanted = bits(run(x))
    for count in (2, 3, 5, 2, 1):
        library.use_threads(count)
        for _ in range(20 if instruction_set == "avx512" else 2):
            assert torch.equal(bits(run(x)), wanted)


def experts() -> Experts:
    matrices = ExpertMatrices(
        router=matrix(BF16, 4, 256),
        bias=torch.randn(4),
        image_bias=None,
        gate=[matrix(FP4, 512, 256, SCALES) for _ in range(4)],
        up=[matrix(FP4, 512, 256, SCALES) for _ in range(4)],
        down=[matrix(FP4, 256, 512, SCALES) for _ in range(4)],
        shared_gate_up=matrix(FP8, 1024, 256, SCALES),
        shared_down=matrix(FP8, 256, 512, SCALES),
    )
    return Experts(load(), matrices, per_token=2, scale=1.5, limit=10.0)


@pytest.mark.parametrize(("rows", "calls"), [(4, 300), (160, 12)])
def test_calls_with_more_threads_than_cores_end_and_give_the_same_bits(rows: int, calls: int) -> None:
    library = load()
    run = Product(library, matrix(FP4, 4096, 512), is_quantised=True)
    x = torch.randn(rows, 512).bfloat16()
    wanted = bits(run(x))
    for count in (7, 3, 7):
        library.use_threads(count)
        for _ in range(calls):
            assert torch.equal(bits(run(x)), wanted)


@on_every_instruction_set
def test_callers_that_come_at_once_get_their_own_bits(instruction_set: str) -> None:
    del instruction_set
    run, others = experts(), [experts() for _ in range(2)]
    u = (torch.randn(40, 256) / 8).bfloat16()
    wanted = [one(u) for one in (run, *others)]
    load().use_threads(3)
    wrong: list[int] = []

    def call(place: int, one: Experts) -> None:
        for _ in range(15):
            if not torch.equal(one(u), wanted[place]):
                wrong.append(place)

    callers = [threading.Thread(target=call, args=pair) for pair in enumerate((run, *others))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert wrong == []
    assert not any(caller.is_alive() for caller in callers)


@on_every_instruction_set
def test_threads_change_no_bit_of_a_half(instruction_set: str) -> None:
    library = load(instruction_set)
    weights = torch.randn(24, 4 * 512) * 0.05, torch.randn(24), torch.rand(3), torch.rand(512)
    streams = Streams(library, *weights, iterations=20, norm_eps=1e-20, eps=1e-6)
    x, pre = torch.randn(67, 4, 512).bfloat16(), torch.rand(67, 4)

    def parts() -> list[Tensor]:
        found = streams.open(x, pre)
        return [found.u_TD, found.pre_TM, found.post_TM, found.comb_TMM]

    wanted = parts()
    library.use_threads(3)
    for _ in range(5):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(parts(), wanted, strict=True))
