"""A decode step on native kernels is thin: few calls a layer, outputs that are written again and not made anew."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headrace.core.shipped import SHIPPED_MODEL
from headrace.kernels.native.library import Library, available, why_absent
from headrace.kernels.native.room import Room, Rooms
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics

MOST_CALLS = 15  # a layer; half of this model's layers are sources, which make most
MOST_TENSORS = 28  # a step: what does not repeat with every layer
STREAMS = 3

pytestmark = pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")


def loaded() -> DeepseekV41:
    return load_model(SHIPPED_MODEL, LoadOptions(numerics=Numerics(kernels="native"))).model


class Decoding:
    """A few sequences beyond the index's easy rows, one token at a time."""

    def __init__(self, streams: int) -> None:
        self.model = loaded()
        self.states = [self.model.new_state() for _ in range(streams)]
        ids = np.random.default_rng(0).integers(5, 4000, 300)
        self.model.forward([Span(state, ids[place:], 300 - place) for place, state in enumerate(self.states)])
        for _ in range(4):
            self.step()

    def step(self) -> None:
        self.model.forward([Span(state, np.array([7]), 1) for state in self.states])


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls of every kernel; each is made all the same."""
    calls: Counter[str] = Counter()
    found = Library.function

    def function(self: Library, name: str, num_arguments: int) -> Any:
        run = found(self, name, num_arguments)

        def call(*arguments: int) -> int:
            calls[name] += 1
            return int(run(*arguments))

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Library, "function", function)
        yield calls


def test_a_layer_is_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as calls:
        decoding = Decoding(STREAMS)
        calls.clear()
        decoding.step()
        layers = decoding.model.config.num_layers
        per_stream = calls["hr_compress"] + calls["hr_gather"]  # the only ones that are made for every sequence
        assert sum(calls.values()) - per_stream * (STREAMS - 1) / STREAMS <= MOST_CALLS * layers
        assert calls["hr_attend"] == calls["hr_experts"] == calls["hr_streams_follow"] == layers


@pytest.mark.parametrize("streams", [1, STREAMS])
def test_a_token_makes_no_tensors_for_its_layers(streams: int) -> None:
    decoding = Decoding(streams)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(4):
            decoding.step()
    made = sum(event.name in ("aten::empty", "aten::empty_strided") for event in seen.events()) / 4
    assert 0 < made <= MOST_TENSORS + 6 * (streams - 1)


def test_tokens_leave_nothing_behind() -> None:
    decoding = Decoding(2)
    tracemalloc.start()
    try:
        held = []
        for _ in range(3):
            for _ in range(20):
                decoding.step()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[2] - held[1] < 20_000


def test_rooms_give_the_same_output_again_and_keep_few() -> None:
    room = Rooms().tensor("part", 3, torch.float32)
    assert room.of(5) is room.of(5)
    assert room.of(65) is not room.of(65)  # a prompt's rows
    first = room.of(5)
    for rows in range(1, 65):
        room.of(rows)
    assert room.of(5) is not first and room.of(5).shape == (5, 3)
    assert Rooms(0).tensor("part", 3, torch.float32).of(2) is not Rooms(0).tensor("part", 3, torch.float32).of(2)
    made: Room[list[int]] = Room(lambda rows: [rows])
    assert made.of(2) == [2]


def test_what_a_pass_returns_is_its_own() -> None:
    decoding = Decoding(1)
    first = decoding.model.forward([Span(decoding.states[0], np.array([7]), 1)], wants_taps=True)
    assert first.taps is not None
    kept = first.logits.clone(), first.taps.clone()
    decoding.model.forward([Span(decoding.states[0], np.array([9]), 1)], wants_taps=True)
    assert torch.equal(first.logits, kept[0]) and torch.equal(first.taps, kept[1])
