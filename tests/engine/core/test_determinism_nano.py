"""The determinism matrix on headrace-nano, at real lengths: every cell says what the plain model says alone.

The engine drafts in every step, the plain model never.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.core.shipped import SHIPPED_MODEL
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.options import EngineOptions
from headrace.engine.sampling.params import SamplingParams
from headrace.kernels.native.choice import VARIABLE, wanted_kernels
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from tests.engine.core.serving import GREEDY, SEEDED, Client, alone_on
from tests.traces import KERNELS

pytestmark = pytest.mark.full

KINDS = pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])
NEW = 6


@pytest.fixture(autouse=True, params=KERNELS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything under every numerics."""
    monkeypatch.setenv(VARIABLE, request.param)


@cache
def nano(kernels: str) -> DeepseekV41:
    return load_model(SHIPPED_MODEL, LoadOptions(numerics=Numerics(kernels=kernels))).model


def engine(**options: Any) -> EngineCore:
    chosen = {"threads": 1, "num_slots": 17, "is_audited": True, "drafting": "always", **options}
    return build_core(SHIPPED_MODEL, EngineOptions(**chosen), None, None)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(400, 4600, count).tolist()


def wants(kind: Mapping[str, float], **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **kind, **values})


@cache
def alone(kernels: str, prompt: tuple[int, ...], is_seeded: bool, new: int) -> tuple[list[int], list[float]]:
    return alone_on(nano(kernels), prompt, wants(SEEDED if is_seeded else GREEDY, max_tokens=new))


def check(client: Client, name: str, prompt: list[int], kind: Mapping[str, float], new: int = NEW) -> None:
    result = client.results[name][0]
    assert (result.token_ids, result.logprobs) == alone(wanted_kernels(None), tuple(prompt), kind is SEEDED, new)


@KINDS
@pytest.mark.parametrize("chunk", [64, 128, 200, 512])
@pytest.mark.parametrize("others", [0, 1, 7, 15])
def test_neighbours_and_chunks(others: int, chunk: int, kind: Mapping[str, float]) -> None:
    client = Client(engine(chunk=chunk))
    client.submit("one", ids(700), wants(kind))
    for index in range(others):
        client.submit(f"other {index}", ids(20 + 37 * index, seed=index + 1), wants(GREEDY, max_tokens=1 + index % 4))
        client.step(index % 3)
    client.finish()
    check(client, "one", ids(700), kind)


@KINDS
@pytest.mark.parametrize("suffix", [1, 3, 65, 129])
@pytest.mark.parametrize("matched", [0, 1, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_prefix_hits(matched: int, suffix: int, kind: Mapping[str, float]) -> None:
    client = Client(engine())
    first = ids(600)
    client.submit("first", first, wants(GREEDY))
    client.finish()
    prompt = [*first[:matched], *ids(suffix, seed=matched + 5)]
    prompt[matched] = 399
    client.submit("second", prompt, wants(kind))
    client.finish()
    check(client, "second", prompt, kind)


@KINDS
def test_two_in_a_pool_for_one_and_a_half(kind: Mapping[str, float]) -> None:
    options = {"cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0, "num_slots": 2}
    client = Client(engine(**options))
    for name, count, seed in (("old", 115, 1), ("young", 125, 2)):
        client.submit(name, ids(count, seed), wants(kind, max_tokens=18))
    client.finish()
    assert client.results["young"][0].work.preemptions >= 1
    check(client, "old", ids(115, 1), kind, 18)
    check(client, "young", ids(125, 2), kind, 18)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads: int) -> None:
    client = Client(engine(threads=threads))
    client.submit("one", ids(500), wants(GREEDY))
    client.finish()
    check(client, "one", ids(500), GREEDY)
