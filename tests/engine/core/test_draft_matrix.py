"""Drafts of every kind change speed only: each answer of headrace-nano is the one without drafts, to the last bit.

Every cell serves the same requests twice, with drafts in every step and without any, and compares whole results.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.shipped import HELD_OUT_NAME, SHIPPED_MODEL
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.options import EngineOptions
from headrace.engine.result import Result
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.spec import Structured
from headrace.kernels.native.choice import VARIABLE
from headrace.models.deepseek_v41.draft import Drafter
from headrace.text.tokenizer import Tokenizer
from tests.engine.core.serving import GREEDY, SEEDED, Client
from tests.traces import KERNELS

NEW, PROMPT = 12, 136
WAYS = ("model", "shuffled", "lookup")
SMALL = {"cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0, "num_slots": 2}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def shuffled(value: Any, numbers: np.random.Generator) -> Any:
    """Return weights with the elements of every tensor in another order; bytes that make one value stay together."""
    if isinstance(value, Tensor):
        if value.dtype == torch.uint8 and value.dim() > 2 and value.shape[-1] == 4:
            return shuffled(value.contiguous().view(torch.int32), numbers).view(torch.uint8)
        order = torch.from_numpy(numbers.permutation(value.numel()))
        flat = value.contiguous().view(torch.uint8) if value.element_size() == 1 else value.contiguous()
        return flat.flatten()[order].view(value.dtype).reshape(value.shape)
    if isinstance(value, tuple):
        return tuple(shuffled(one, numbers) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: shuffled(getattr(value, one.name), numbers) for one in fields(value) if one.init}
        return replace(value, **parts)
    return value


def engine(way: str, **options: Any) -> EngineCore:
    """Return a core that drafts in every step the way that is named, "off" never."""
    drafter = {"off": None, "lookup": "lookup"}.get(way, "model")
    drafting = "off" if way == "off" else "always"
    chosen = {"threads": 1, "num_slots": 8, "is_audited": True, **options}
    core = build_core(SHIPPED_MODEL, EngineOptions(**chosen, drafting=drafting, drafter=drafter), None, None)
    if way == "shuffled":
        model = core.model
        weights = shuffled(model.parameters.draft, np.random.default_rng(0))
        parameters = replace(model.parameters, draft=weights)
        core._drafting.drafter._drafter = Drafter(model.config, parameters, model.frequencies.plain)
    return core


@cache
def text(place: int) -> tuple[int, ...]:
    """Return the beginning of a held-out document."""
    with (SHIPPED_MODEL / HELD_OUT_NAME).open(encoding="utf-8") as file:
        lines = file.readlines()
    ids = Tokenizer.from_file(SHIPPED_MODEL).encode(json.loads(lines[place])["text"])
    return tuple(ids[: PROMPT - 20 * place])


def requests(kind: Mapping[str, float]) -> dict[str, tuple[tuple[int, ...], SamplingParams]]:
    """Return one request for everything that sampling and stopping can be asked for."""
    first, second = text(0), text(1)
    told = Structured.json_schema(json.dumps(SCHEMA))

    def wants(**values: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **kind, **values})

    return {
        "plain": (first, wants()),
        "schema": (second, wants(structured=told, ignore_eos=False, max_tokens=2 * NEW)),
        "stop": (second, wants(stop=("\n", ")"))),
        "least": (first, wants(stop=("\n", "e"), min_tokens=NEW - 2, ignore_eos=False)),
        "alternatives": (second, wants(top_logprobs=3)),
        "penalties": (first, wants(frequency_penalty=0.8, repetition_penalty=1.2, min_p=0.02)),
        "several": (second, wants(n=3)),
    }


def served(core: EngineCore, kind: Mapping[str, float]) -> dict[str, list[Result]]:
    """Serve all requests together, joining while others run, and then one that finds its prompt in the cache."""
    client = Client(core)
    for name, (ids, wants) in requests(kind).items():
        client.submit(name, ids, wants)
        client.step(2)
    client.finish()
    client.submit("hit", [*text(0), *text(1)[:5]], SamplingParams(max_tokens=NEW, ignore_eos=True, **kind))
    client.finish()
    assert not client.errors
    return {name: [results[choice] for choice in sorted(results)] for name, results in client.results.items()}


def said(result: Result) -> tuple[object, ...]:
    return (
        result.token_ids,
        result.logprobs,
        result.token_logprobs,
        result.text,
        result.finish_reason,
        result.stop,
        result.usage.completion_tokens,
    )


@cache
def undrafted(kernels: str, is_seeded: bool) -> dict[str, list[Result]]:
    return served(engine("off", chunk=128), SEEDED if is_seeded else GREEDY)


def check(way: str, kind: Mapping[str, float], kernels: str, **options: Any) -> None:
    plain, drafted = undrafted(kernels, kind is SEEDED), served(engine(way, **options), kind)
    assert drafted.keys() == plain.keys()
    for name, results in drafted.items():
        assert [said(one) for one in results] == [said(one) for one in plain[name]], name
    assert drafted["hit"][0].usage.cached_tokens > 0
    assert plain["schema"][0].text.startswith('{"name":')
    works = [one.work for results in drafted.values() for one in results]
    proposed, accepted = (sum(getattr(one, f"drafts_{what}") for one in works) for what in ("proposed", "accepted"))
    assert proposed > 0
    if way == "shuffled":
        assert accepted < 0.05 * proposed
    if way == "model":
        assert accepted > 0.08 * proposed


KINDS = pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_answer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    check(way, SEEDED, "torch", chunk=128)


@pytest.mark.full
@KINDS
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("chunk", "threads"), [(64, 1), (128, 2), (200, 1), (512, 1), (512, 2)])
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_answer_whatever_the_step(
    way: str, chunk: int, threads: int, kernels: str, kind: Mapping[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    check(way, kind, kernels, chunk=chunk, threads=threads)


@pytest.mark.full
@KINDS
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_is_swapped_out_stays_the_same(way: str, kind: Mapping[str, float]) -> None:
    found = []
    for one in ("off", way):
        client = Client(engine(one, **SMALL))
        for name, place in (("old", 1), ("young", 0)):
            wants = SamplingParams(max_tokens=40, ignore_eos=True, **kind)
            client.submit(name, text(place)[:125], wants)
        client.finish()
        assert client.results["young"][0].work.preemptions >= 1
        found.append([said(client.results[name][0]) for name in ("old", "young")])
    assert found[0] == found[1]
