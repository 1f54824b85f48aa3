"""Opening a checkpoint as a model: what is read, what is only mapped, what is left out, what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.errors import CheckpointError, InternalError, UserError
from headrace.memory.table import MappedTable, MemoryTable
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.config import Config, table_rows
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.parameters import build_parameters
from headrace.models.deepseek_v41.weights import load_weights
from headrace.text.tokenizer import Tokenizer
from tests import damage
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER, config

EVERYTHING = LoadOptions(has_draft=True, has_vision=True)


def table_of(options: LoadOptions, layer_id: int) -> object:
    ngram = load_model(FOLDER, options).model.parameters.layers[layer_id].ngram
    assert ngram is not None
    return ngram.table


# ------------------------------------------------------------------------------------------------- what is loaded


def test_tables_are_mapped_and_read_into_memory_only_if_asked() -> None:
    assert isinstance(table_of(LoadOptions(), 1), MappedTable)
    in_memory = table_of(LoadOptions(ngram_source="memory"), 4)
    assert isinstance(in_memory, MemoryTable)
    assert not isinstance(in_memory, MappedTable)


def test_only_layers_with_tables_have_n_grams() -> None:
    layers = load_model(FOLDER).model.parameters.layers
    assert [layer.plan.id for layer in layers if layer.ngram is not None] == [1, 4]


def test_draft_and_image_tower_are_left_out_unless_asked_for() -> None:
    plain, whole = load_model(FOLDER).model.parameters, load_model(FOLDER, EVERYTHING).model.parameters
    assert plain.draft is None
    assert plain.vision == {}
    assert whole.draft is not None
    assert len(whole.draft.layers) == 2
    expected = {spec.name for spec in expected_tensors(config())}
    assert set(whole.vision) == {name for name in expected if name.startswith(("vision.", "aligner.", "image_"))}


@pytest.mark.parametrize("options", [LoadOptions(), EVERYTHING], ids=["text", "everything"])
def test_every_loaded_tensor_is_used_and_the_rest_is_on_the_list(options: LoadOptions) -> None:
    weights = load_weights(FOLDER, config(), skip_draft=not options.has_draft, skip_vision=not options.has_vision)
    listed = set(weights.tensors) | set(weights.skipped)
    listed |= {f"layers.{i}.engram.embed.{part}" for i in weights.tables for part in ("weight", "scale")}
    assert listed == {spec.name for spec in expected_tensors(config())}
    assert all(reason for reason in weights.skipped.values())
    build_parameters(weights, config(), torch.device("cpu"))
    assert weights.tensors == {}


def test_a_tensor_that_nothing_uses_is_an_error() -> None:
    weights = load_weights(FOLDER, config())
    weights.tensors["layers.0.attn.forgotten"] = torch.zeros(1)
    with pytest.raises(InternalError, match=r"layers\.0\.attn\.forgotten"):
        build_parameters(weights, config(), torch.device("cpu"))


def test_progress_reports_all_bytes_but_those_of_tables() -> None:
    seen: list[int] = []
    load_model(FOLDER, progress=seen.append)
    weights = load_weights(FOLDER, config(), skip_draft=True, skip_vision=True)
    assert sum(seen) == sum(weights.catalog.tensors[name].nbytes for name in weights.tensors)


def test_what_is_left_out_is_not_read(tmp_path: Path) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "draft", damage.set_byte("mtp.1.attn.wkv.scale", 3, 255))
    assert load_model(folder).model.parameters.draft is None
    with pytest.raises(CheckpointError, match=r"mtp\.1\.attn\.wkv\.scale"):
        load_model(folder, LoadOptions(has_draft=True))


def test_a_damaged_table_row_fails_the_request_that_reads_it_and_no_other(tmp_path: Path) -> None:
    model = load_model(FOLDER).model
    assert model.addressing is not None
    compressed = model.addressing.compress(np.array([7, 8, 9]))
    rows = model.addressing.row_ids(model.addressing.history(compressed, model.addressing.fresh()))
    row = int(rows[2, 1, 0])  # third token, second table, first column
    change = damage.set_byte("layers.4.engram.embed.scale", row, 255)
    damaged = load_model(damage.copy_with(FOLDER, tmp_path / "table", change)).model
    damaged.forward([Span(damaged.new_state(), np.array([7, 8]), 2)])
    with pytest.raises(UserError, match=rf"table of layer 4: row {row} holds a scale byte of 255"):
        damaged.forward([Span(damaged.new_state(), np.array([7, 8, 9]), 3)])
    with pytest.raises(CheckpointError, match=r"layers\.4\.engram\.embed\.scale"):
        load_model(tmp_path / "table", LoadOptions(ngram_source="memory"))


# ------------------------------------------------------------------------------------------------------ tokenizers


def test_a_model_with_n_grams_needs_its_tokenizer(tmp_path: Path) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "bare", lambda _: None)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; .*map of 256 token classes"):
        load_model(folder)


def test_a_model_without_n_grams_runs_without_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(engram=False))
    assert load_model(folder).tokenizer is not None
    (folder / "tokenizer.json").unlink()
    loaded = load_model(folder)
    assert loaded.tokenizer is None
    assert loaded.model.addressing is None


def test_a_token_map_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "other", lambda _: None)
    other = tiny_checkpoint(tmp_path, tiny_config())  # 280 classes
    assert Tokenizer.from_file(other / "tokenizer.json").size == 320
    shutil.copy(other / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"280.*256|256.*280"):
        load_model(folder)


# ---------------------------------------------------------------------------------------------------------- memory

# VmHWM, the highest resident size so far; a small model is loaded first, so that imports do not count
MEASURE = """
import json, sys
from pathlib import Path
import torch
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.weights import load_weights

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))

load_model(sys.argv[2])
before = memory("VmRSS")
model = load_model(sys.argv[1]).model
print(json.dumps({"final": memory("VmRSS") - before, "peak": memory("VmHWM") - before}))
"""
SLACK_BYTES = 24 * 2**20  # allocator, page tables, buffers of conversions in slices


def wide_config() -> Config:
    """About 45 MB of packed experts, a vocabulary head of 41 MB as float32, tables of 77 MB that are not to be read."""
    tables = {
        "engram_vocab_size": 50_000,
        "engram_head_dim": 128,
        "engram_num_embeddings": list(table_rows(50_000, num_layers=2, max_ngram=4, num_hashes=2)),
    }
    wide = {"vocab_size": 40_000, "hidden_size": 256, "n_routed_experts": 64, "moe_intermediate_size": 256}
    return tiny_config(draft=False, vision=False, **wide, **tables)


def test_loading_takes_the_final_size_and_at_most_the_largest_tensor_more(tmp_path: Path) -> None:
    config = wide_config()
    folder, small = tiny_checkpoint(tmp_path, config), tiny_checkpoint(tmp_path / "small")
    stored = {"tables": 0, "experts": 0, "dense": 0}
    for spec in expected_tensors(config):
        kind = "tables" if ".engram.embed." in spec.name else "experts" if ".ffn.experts." in spec.name else "dense"
        stored[kind] += spec.num_bytes
    command = [sys.executable, "-c", MEASURE, str(folder), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(done.stdout)
    assert stored["tables"] > 70e6  # mapped, so in neither number
    assert stored["experts"] > 40e6  # four times as much, were they unpacked
    final = stored["experts"] + 2 * stored["dense"]  # FP8 as bfloat16, the vocabulary head as float32
    assert measured["final"] <= final + SLACK_BYTES
    assert measured["peak"] <= measured["final"] + 4 * config.vocab_size * config.hidden_size + SLACK_BYTES
