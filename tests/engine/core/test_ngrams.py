"""Where n-gram rows come from changes no answer; they are asked for early, and every read is on the books."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import CheckpointError, UserError
from headrace.engine.core.build import _bytes_outside, build_core
from headrace.engine.core.options import EngineOptions
from headrace.memory import read_pool
from headrace.memory.read_source import ReadSource
from headrace.memory.row_counts import NgramReads
from headrace.memory.row_store import RowStore
from headrace.memory.source_name import ScalesName
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from tests import damage
from tests.engine.core.serving import SEEDED, Client, alone_on, core, params, prompt, said
from tests.engine.core.test_drafts import Scripted
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER
from tests.traces import SHAPES, golden_model

SOURCES = ("memory", "mmap", "read")
PROMPTS = [prompt(150), prompt(37, 3), prompt(9, 4), [*prompt(100), *prompt(20, 5)]]


@pytest.fixture(scope="module", params=["three streams", "n-grams and taps on both sides of the cut"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("ngrams"), tiny_config(**SHAPES[request.param]))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], list[float]]]:
    """What the model says alone, in one chunk, with plain look-ups in the tables."""
    model = load_model(folder).model
    assert model.memory is not None
    plain = DeepseekV41(
        model.config, model.parameters, model.addressing, device=model.device, numerics=model.numerics, row_store=None
    )
    return [alone_on(plain, tuple(ids), params(**SEEDED), "replay") for ids in PROMPTS]


def opened(folder: Path, **options: Any) -> DeepseekV41:
    return load_model(folder, LoadOptions(**options)).model


def reads_of(model: DeepseekV41) -> NgramReads:
    assert model.memory is not None
    assert model.memory.store is not None
    return model.memory.store.counts


def serve(model: DeepseekV41, chunk: int = 64, **options: Any) -> Client:
    client = Client(core(model, chunk=chunk, trace_steps=4096, max_rows=90, **options))
    for index, ids in enumerate(PROMPTS):
        client.submit(f"r{index}", ids, params(**SEEDED))
        client.step()
    client.finish()
    assert not client.errors
    return client


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("cache_bytes", "chunk"), [(0, 64), (3000, 9), (10**6, 31)])
def test_answers_are_the_same_bits(
    folder: Path, expected: list[tuple[list[int], list[float]]], source: str, cache_bytes: int, chunk: int
) -> None:
    model = opened(folder, ngram_source=source, ngram_cache_bytes=cache_bytes, ngram_workers=2)
    client = serve(model, chunk)
    assert [said(client.results[f"r{index}"][0]) for index in range(len(PROMPTS))] == expected
    client.core.close()


def test_every_row_is_on_the_books(folder: Path) -> None:
    model = opened(folder, ngram_source="read", ngram_cache_bytes=4000)
    client = serve(model)
    totals, traces = client.core.totals, client.core.traces.newest()
    added = NgramReads()
    for trace in traces:
        added.add(NgramReads(dict(trace.ngram)))
    assert totals.ngram.layers.keys() == reads_of(model).layers.keys() == added.layers.keys()
    addressing = model.addressing
    assert addressing is not None
    for layer_id, reads in totals.ngram.layers.items():
        assert reads.requested == addressing.columns * totals.encoder_rows
        assert reads.read == reads.requested - reads.hits
        assert 0 < reads.read < reads.unique < reads.requested
        assert reads.read_bytes == reads.read * 33
        assert reads.unused == 0
        assert reads.wait_s > 0
        assert added.layers[layer_id].read == reads.read
    client.core.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens whose rows were first asked for by the forward pass that needed them."""
    found: list[int] = []
    begin = RowStore._begin

    def watched(self: RowStore, row_ids: np.ndarray, *, is_urgent: bool) -> Any:
        if is_urgent:
            found.append(len(row_ids))
        return begin(self, row_ids, is_urgent=is_urgent)

    monkeypatch.setattr(RowStore, "_begin", watched)
    yield found


def test_rows_are_asked_for_before_the_step_that_needs_them(
    folder: Path, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    announce = RowStore.announce
    client = Client(core(opened(folder), chunk=64))

    def watched(self: RowStore, row_ids: np.ndarray) -> None:
        asked.append((client.steps, len(row_ids)))
        announce(self, row_ids)

    monkeypatch.setattr(RowStore, "announce", watched)
    client.submit("one", prompt(150), params(max_tokens=4))
    client.finish()
    # step 0 asks for its own chunk and the next; then always for what comes next; the last token is not run
    assert [one for one in asked if one[0] == 0] == [(0, 64), (0, 64)]
    assert (1, 22) in asked
    assert [count for step, count in asked if step >= 3] == [1] * 2
    assert late == []


def test_what_nobody_runs_is_given_up(folder: Path) -> None:
    model = opened(folder, ngram_source="read")
    client = Client(core(model, chunk=16, max_rows=64))
    for number in range(30):
        client.submit(f"r{number}", prompt(100, number), params())
        client.step()
        client.core.cancel(f"r{number}")
    client.finish()
    reads = client.core.totals.ngram.total
    assert reads.read == reads.requested - reads.hits
    assert model.memory is not None
    assert model.memory.store is not None
    model.memory.store.forget()
    assert reads_of(model).total.unused > 0
    client.core.close()


def test_a_disk_that_fails_ends_the_requests_that_need_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_pool, "open_reader", lambda *_: None)  # whose reads a test can break one by one
    model = opened(folder, ngram_source="read", ngram_cache_bytes=0)
    assert model.memory is not None
    assert model.memory.store is not None
    good, bad = PROMPTS[0], PROMPTS[1]
    row_ids = rows_read_by(model, bad)[0] - rows_read_by(model, good)[0]
    broken_row = sorted(row_ids)[0]
    source = model.memory.store.sources[0]
    read = source.read

    def broken(part: int, ids: np.ndarray, out: np.ndarray) -> None:
        if broken_row in ids:
            raise OSError(5, "Input/output error")
        read(part, ids, out)

    monkeypatch.setattr(source, "read", broken)
    client = Client(core(model))
    client.submit("bad", bad, params(max_tokens=1))
    client.submit("good", good, params(max_tokens=1))
    client.finish()
    assert sorted(client.results) == ["good"]
    assert client.errors["bad"].kind == CheckpointError.__name__
    assert client.errors["bad"].message.endswith("Input/output error")
    assert client.core.totals.failed == 1
    assert said(client.results["good"][0]) == alone_on(opened(folder), tuple(good), params(max_tokens=1))
    client.core.close()


def test_a_table_that_cannot_be_read_ends_requests_and_not_the_engine(folder: Path) -> None:
    model = opened(folder, ngram_source="read", ngram_cache_bytes=0)
    assert model.memory is not None
    assert model.memory.store is not None
    source = model.memory.store.sources[0]
    assert isinstance(source, ReadSource)
    kept, other = os.dup(source._files[0]), os.open(folder, os.O_RDONLY)
    os.dup2(other, source._files[0])  # every read of a folder fails
    client = Client(core(model))
    client.submit("bad", PROMPTS[0], params(max_tokens=1))
    client.finish()
    assert client.errors["bad"].message.endswith("Is a directory")
    time.sleep(0.1)  # what was asked for ahead has failed by now, too
    os.dup2(kept, source._files[0])
    client.submit("good", PROMPTS[0], params(max_tokens=1))
    client.finish()
    assert said(client.results["good"][0]) == alone_on(opened(folder), tuple(PROMPTS[0]), params(max_tokens=1))
    client.core.close()
    for file in (kept, other):
        os.close(file)


def rows_read_by(model: DeepseekV41, ids: Sequence[int]) -> list[set[int]]:
    addressing = model.addressing
    assert addressing is not None
    compressed = addressing.compress(np.array(ids))
    rows = addressing.row_ids(addressing.history(compressed, addressing.fresh()))
    return [set(rows[:, place].ravel().tolist()) for place in range(rows.shape[1])]


def test_a_guess_that_leads_to_a_damaged_row_fails_nobody(tmp_path: Path) -> None:
    """The damaged row is one that only a wrong guess reads."""
    healthy = golden_model()
    ids = prompt(30)
    chosen = params(max_tokens=5)
    answer = alone_on(healthy, tuple(ids), chosen)
    whole = [*ids, *answer[0]]
    wrong = [(token + 1) % 250 for token in whole]
    needed = rows_read_by(healthy, whole)[1]
    guessed = rows_read_by(healthy, [*whole[:32], *wrong[32:34]])[1] - needed
    row = sorted(guessed)[0]
    change = damage.set_byte("layers.4.engram.embed.weight", row * 32 + 5, 0x7F)
    model = load_model(damage.copy_with(FOLDER, tmp_path / "damaged", change)).model
    drafter = Scripted({tuple(ids): answer[0]}, [0, 1, 2], 3)
    client = Client(core(model, drafter=drafter))
    client.submit("one", ids, chosen)
    client.finish()
    assert not client.errors, client.errors
    assert said(client.results["one"][0]) == answer


def test_options_reach_the_store(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    small = {"num_slots": 2, "cache_tokens": 512, "max_context": 256}
    asked = (EngineOptions(**small), EngineOptions(**small, ngram_source="read", ngram_cache_bytes=20_000))
    engines = [build_core(folder, options, None, None) for options in asked]
    stores = [engine.model.memory.store for engine in engines if engine.model.memory is not None]
    assert [type(store.sources[0]).__name__ for store in stores if store] == ["TableSource", "ReadSource"]
    assert stores[0] is not None
    assert stores[1] is not None
    assert stores[0].cache_bytes == 0
    assert 15_000 < stores[1].cache_bytes <= 20_000
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("scales", "bytes_a_row"), [(None, 1), ("memory", 1), ("file", 0)])
def test_resident_scales_are_planned_as_weights(tmp_path: Path, scales: ScalesName | None, bytes_a_row: int) -> None:
    folder = tiny_checkpoint(tmp_path)
    options = EngineOptions(
        num_slots=2, cache_tokens=512, max_context=256, ngram_source="read", ngram_scales=scales, ngram_cache_bytes=0
    )
    engine = build_core(folder, options, None, None)
    assert engine.model.memory is not None
    assert engine.model.memory.store is not None
    sources = engine.model.memory.store.sources
    assert all(isinstance(source, ReadSource) for source in sources)
    resident = sum(source.resident_bytes for source in sources if isinstance(source, ReadSource))
    assert resident == bytes_a_row * sum(source.rows for source in sources)  # rows are one block of 32 codes
    outside = sum(source.rows * (source.head_dim + 1) for source in sources) - resident
    assert _bytes_outside(engine.model) == outside
    engine.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ngram_source", "tape", "ngram_source is 'tape'; accepted are None, 'memory', 'mmap', 'read'"),
        ("ngram_scales", "tape", "ngram_scales is 'tape'; accepted are None, 'memory', 'file'"),
        ("ngram_cache_bytes", -1, "ngram_cache_bytes is -1; accepted is a whole number from 0"),
        ("ngram_workers", 0, "ngram_workers is 0; accepted is a whole number from 1"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineOptions(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{name} is"):
        LoadOptions(**{name: value})  # type: ignore[arg-type]
