"""A forward pass takes the same n-gram rows from every source; what is damaged ends its own span only."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import UserError
from headrace.core.shipped import shipped_model
from headrace.models.deepseek_v41 import ngram_sources
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.ngram_rows import NgramMemory
from tests import damage
from tests.golden_mini import FOLDER
from tests.traces import golden_model, same_bits, state_bits, whole_span

SOURCES = ("memory", "mmap", "read")


def plain(model: DeepseekV41) -> DeepseekV41:
    """The same model with look-ups in its tables."""
    return DeepseekV41(
        model.config, model.parameters, model.addressing, device=model.device, numerics=model.numerics, row_store=None
    )


def memory_of(model: DeepseekV41) -> NgramMemory:
    assert model.memory is not None
    return model.memory


def run(model: DeepseekV41, ids: np.ndarray, sizes: list[int], *, is_ahead: bool) -> tuple[list[torch.Tensor], Span]:
    """Read ids in pieces; the rows of the next piece are asked for before each, if at all."""
    span, found, low = Span(model.new_state(), ids[:0], 0), [], 0
    for place, size in enumerate(sizes):
        span = Span(span.state, ids[low : low + size], size)
        low += size
        if is_ahead and place + 1 < len(sizes):
            first = max(0, low - memory_of(model).addressing.lookback)
            memory_of(model).announce_part(ids[first : low + sizes[place + 1]], low - first, None)
        found.append(model.forward([span], wants_all_logits=True, is_tolerant=is_ahead).logits)
    return found, span


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cache_bytes", [0, 2000, None])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["on demand", "ahead"])
def test_the_golden_model_computes_the_same_bits(source: str, cache_bytes: int | None, is_ahead: bool) -> None:
    ids = np.random.default_rng(3).integers(0, 512, 40)
    options = LoadOptions(ngram_source=source, ngram_cache_bytes=cache_bytes, has_draft=True, has_vision=True)
    model = load_model(FOLDER, options).model
    sizes = [17, 1, 1, 20, 1]
    got, got_span = run(model, ids, sizes, is_ahead=is_ahead)
    wanted, wanted_span = run(plain(golden_model()), ids, sizes, is_ahead=False)
    assert all(same_bits(*pair) for pair in zip(got, wanted, strict=True))
    states = [state_bits(model, one) for one in (got_span, wanted_span)]
    assert all(same_bits(states[0][name], states[1][name]) for name in states[1])


def test_the_shipped_model_computes_the_same_bits() -> None:
    folder = shipped_model()
    ids = np.random.default_rng(4).integers(3, 4000, 70)
    sizes, wanted = [40, 27, 1, 1, 1], None
    for source, cache_bytes in (("mmap", 0), ("memory", 0), ("read", 5000), ("read", 10**6)):
        options = LoadOptions(ngram_source=source, ngram_cache_bytes=cache_bytes)  # type: ignore[arg-type]
        model = load_model(folder, options).model
        wanted = wanted or run(plain(model), ids, sizes, is_ahead=False)[0]
        got = run(model, ids, sizes, is_ahead=True)[0]
        assert all(same_bits(*pair) for pair in zip(got, wanted, strict=True)), source


def test_a_row_cache_larger_than_the_machine_is_refused_before_it_is_taken() -> None:
    with pytest.raises(UserError, match=f"ngram_cache_bytes is {1 << 60}; accepted are at most the "):
        load_model(FOLDER, LoadOptions(ngram_cache_bytes=1 << 60))


def test_image_tokens_ask_for_the_same_rows_ahead() -> None:
    memory = memory_of(load_model(FOLDER).model)
    assert memory.store is not None
    ids = np.arange(20)
    marks = np.zeros(20, dtype=bool)
    marks[6:9] = True
    memory.announce_part(ids[5:], 3, marks[5:])
    wanted = memory.addressing.row_ids(
        memory.addressing.history(memory.addressing.compress(ids, marks), memory.addressing.fresh())
    )
    before = memory.store.counts.total.requested
    memory.store.collect(wanted[8:])
    assert memory.store.counts.total.requested == before  # all of them were under way


@pytest.mark.parametrize(("memory_bytes", "kind"), [(100_000, "ReadSource"), (10**6, "TableSource")])
def test_tables_above_half_of_the_memory_are_read_row_by_row(
    memory_bytes: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory_bytes}
    monkeypatch.setattr(ngram_sources.os, "sysconf", sizes.__getitem__)
    memory = memory_of(load_model(FOLDER).model)
    assert memory.store is not None
    stored = sum(table.rows * 33 for table in memory.tables.values())
    assert 50_000 < stored < 500_000
    assert {type(source).__name__ for source in memory.store.sources} == {kind}
    memory.store.close()


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[DeepseekV41, int]:
    """The golden model with a damaged row of the second table that token 7, alone, reads; and that row."""
    addressing = golden_model().addressing
    assert addressing is not None
    row = int(addressing.row_ids(addressing.history(addressing.compress([7]), addressing.fresh()))[0, 1, 0])
    change = damage.set_byte("layers.4.engram.embed.weight", row * 32 + 5, 0x7F)
    return load_model(damage.copy_with(FOLDER, tmp_path / "damaged", change)).model, row


def test_a_damaged_row_is_an_error_before_anything_is_computed(damaged: tuple[DeepseekV41, int]) -> None:
    model, row = damaged
    span = whole_span(model, np.array([7]))
    before = state_bits(model, span)
    with pytest.raises(UserError, match=f"table of layer 4: row {row} holds an E4M3 NaN code"):
        model.forward([span])
    assert all(same_bits(before[name], now) for name, now in state_bits(model, span).items())


def test_a_tolerant_pass_names_the_span_and_computes_the_others(damaged: tuple[DeepseekV41, int]) -> None:
    model, row = damaged
    good = [np.array([9, 10, 11]), np.array([12])]
    spans = [whole_span(model, good[0]), whole_span(model, np.array([7])), whole_span(model, good[1])]
    output = model.forward(spans, is_tolerant=True)
    assert list(output.faults) == [1]
    assert f"row {row} holds" in output.faults[1].message
    for place, ids in ((0, good[0]), (2, good[1])):
        alone = golden_model().forward([whole_span(golden_model(), ids)]).logits
        assert same_bits(output.logits[place : place + 1], alone)
