import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from headrace.checkpoint.catalog import INDEX_NAME, TensorEntry
from headrace.core.errors import CheckpointError, UserError
from headrace.models.deepseek_v41 import synth
from headrace.models.deepseek_v41.check import verify_catalog
from headrace.models.deepseek_v41.config import Config, load_config, table_rows
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.weights import load_weights, save_weights
from tests import damage
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER, config

BIAS_VL = {f"mtp.{stage}.ffn.gate.bias_vl" for stage in (0, 1)}
TABLES = {f"layers.{layer_id}.engram.embed.{part}" for layer_id in (1, 4) for part in ("weight", "scale")}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder by the safetensors library: shape, dtype and bytes in one string."""
    result = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a dict
                tensor = reader.get_tensor(name)
                result[name] = f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + raw(tensor)
    return result


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("skip_draft", [False, True])
@pytest.mark.parametrize("skip_vision", [False, True])
def test_every_tensor_is_loaded_once_or_on_the_list_with_a_reason(skip_draft: bool, skip_vision: bool) -> None:
    weights = load_weights(FOLDER, config(), skip_draft=skip_draft, skip_vision=skip_vision)
    expected = load_file(FOLDER / "model.safetensors")
    skipped = set(BIAS_VL)
    if skip_draft:
        skipped |= {name for name in expected if name.startswith("mtp.")}
    if skip_vision:
        skipped |= {name for name in expected if name.startswith(("vision.", "aligner.", "image_"))}
    assert set(weights.skipped) == skipped
    assert all(weights.skipped.values())
    assert set(weights.tensors) == set(expected) - skipped - TABLES
    assert set(weights.tables) == {1, 4}
    for name, tensor in weights.tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert raw(tensor) == raw(expected[name]), name


@pytest.mark.parametrize("engram", ["mmap", "memory"])
def test_tables_give_the_rows_of_the_file(engram: str) -> None:
    expected = load_file(FOLDER / "model.safetensors")
    tables = load_weights(FOLDER, config(), engram=engram).tables
    for layer_id in (1, 4):
        codes = expected[f"layers.{layer_id}.engram.embed.weight"].float()
        scales = expected[f"layers.{layer_id}.engram.embed.scale"].float()
        row_ids = np.array([[0, 5, len(codes) - 1]])
        got = tables[layer_id].lookup(row_ids)
        assert got.equal((codes * scales.repeat_interleave(32, 1)).bfloat16()[row_ids])


def test_a_conversion_sees_every_tensor_once_and_its_result_is_kept() -> None:
    seen: list[str] = []

    def convert(entry: TensorEntry, tensor: Tensor) -> Tensor:
        seen.append(entry.name)
        return tensor.float() if entry.name.endswith("gate.weight") else tensor

    weights = load_weights(FOLDER, config(), convert=convert)
    assert len(seen) == len(set(seen)) == len(weights.tensors)
    assert weights.tensors["layers.0.ffn.gate.weight"].dtype == torch.float32
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.gate\.weight is .*float32"):
        save_weights(weights, FOLDER / "never")


def test_progress_reports_every_byte_that_is_read() -> None:
    done: list[int] = []
    weights = load_weights(FOLDER, config(), progress=done.append)
    assert sum(done) == sum(tensor.numel() * tensor.element_size() for tensor in weights.tensors.values())


# --------------------------------------------------------------------------------------------------------- refusals

WKV = "layers.2.attn.wkv"
REFUSALS = [
    ("unknown tensor", damage.put("layers.0.attn.extra", torch.ones(2)), r"holds tensor layers\.0\.attn\.extra, which"),
    ("missing tensor", damage.drop(f"{WKV}.weight"), rf"tensor {WKV}\.weight, which .* is missing"),
    ("missing scale", damage.drop(f"{WKV}.scale"), rf"tensor {WKV}\.scale, which .* is missing"),
    ("wrong dtype", damage.cast("layers.2.attn.q_norm.weight", torch.float32), r"q_norm\.weight .* dtype F32; BF16 is"),
    ("unquantised weight", damage.cast(f"{WKV}.weight", torch.bfloat16), r"dtype BF16; F8_E4M3 is expected"),
    ("scale as bytes", damage.put(f"{WKV}.scale", torch.ones(2, 8, dtype=torch.uint8)), r"dtype U8; F8_E8M0 is"),
    (
        "wrong shape",
        damage.put("norm.weight", torch.ones(255).bfloat16()),
        r"norm\.weight .* shape \[255\]; \[256\] is",
    ),
    (
        "scale of the wrong shape",
        damage.put(f"{WKV}.scale", torch.ones(2, 4).to(torch.float8_e8m0fnu)),
        r"shape \[2, 4\]; \[2, 8\] is expected to scale a weight stored as \[64, 256\] F8_E4M3",
    ),
    (
        "scale of a table of the wrong shape",
        damage.put("layers.1.engram.embed.scale", torch.ones(43, 1).to(torch.float8_e8m0fnu)),
        r"layers\.1\.engram\.embed\.scale .* shape \[43, 1\]; \[1362, 1\] is expected to scale",
    ),
    (
        "scale byte 255",
        damage.set_byte(f"{WKV}.scale", 11, 255),
        rf"{WKV}\.scale .* scale byte 255 \(NaN\) at \[1, 3\]",
    ),
    (
        "scale byte 255 of an expert",
        damage.set_byte("layers.9.ffn.experts.7.w2.scale", 5, 255),
        r"experts\.7\.w2\.scale .* 255 \(NaN\) at \[1, 2\]",
    ),
    ("NaN code", damage.set_byte(f"{WKV}.weight", 257, 0x7F), rf"{WKV}\.weight .* E4M3 NaN code at \[1, 1\]"),
    ("negative NaN code", damage.set_byte(f"{WKV}.weight", 0, 0xFF), r"E4M3 NaN code at \[0, 0\]"),
    ("infinite float32", damage.put("layers.0.attn.attn_sink", torch.full((8,), torch.inf)), r"attn_sink .* infinity"),
    (
        "NaN bfloat16",
        damage.put("image_end", torch.full((256,), torch.nan).bfloat16()),
        r"image_end .* NaN or infinity",
    ),
]


@pytest.mark.parametrize(("what", "change", "words"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_a_damaged_checkpoint_is_refused_naming_the_thing(
    tmp_path: Path, what: str, change: damage.Change, words: str
) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", change)
    with pytest.raises(CheckpointError, match=words):
        load_weights(folder, config())


def test_a_missing_file_or_byte_is_refused(tmp_path: Path) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", lambda _: None)
    damage.cut_byte(folder)
    with pytest.raises(CheckpointError, match="1 bytes are missing"):
        load_weights(folder, config())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_weights(folder, config())


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config())
    with pytest.raises(CheckpointError, match=r"hc_attn_fn .* shape \[15, 288\]; \[24, 384\] is expected\."):
        load_weights(folder, tiny_config(4))
    with pytest.raises(CheckpointError, match=r"holds tensor mtp\.0.* and \d+ more, which"):
        load_weights(folder, tiny_config(draft=False))
    folder = tiny_checkpoint(tmp_path / "other", tiny_config(vision=False))
    with pytest.raises(CheckpointError, match=r"tensor image_start and 25 more, which"):
        load_weights(folder, tiny_config())


def test_what_is_not_loaded_is_not_read(tmp_path: Path) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", damage.set_byte("mtp.0.attn.wkv.scale", 0, 255))
    assert load_weights(folder, config(), skip_draft=True).tensors
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn\.wkv\.scale"):
        load_weights(folder, config())


def test_tables_are_checked_when_rows_are_read(tmp_path: Path) -> None:
    change = damage.set_byte("layers.4.engram.embed.scale", 77, 255)
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", change)
    weights = load_weights(folder, config())
    assert weights.tables[4].lookup(np.array([[76, 78]])).isfinite().all()
    with pytest.raises(UserError, match="table of layer 4: row 77 holds a scale byte of 255"):
        weights.tables[4].lookup(np.array([[76, 77]]))
    with pytest.raises(CheckpointError, match=r"layers\.4\.engram\.embed\.scale .* at \[77, 0\]"):
        load_weights(folder, config(), engram="memory")
    with pytest.raises(CheckpointError, match=r"layers\.4\.engram\.embed\.scale .* at \[77, 0\]"):
        verify_catalog(weights.catalog, config())


# ----------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("max_shard_bytes", [2**30, 2_000_000])
def test_loading_and_saving_changes_no_bit(tmp_path: Path, max_shard_bytes: int) -> None:
    save_weights(load_weights(FOLDER, config()), tmp_path / "copy", max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "copy" / INDEX_NAME).exists() == (max_shard_bytes < 2**30)
    assert stored(tmp_path / "copy") == stored(FOLDER)
    assert load_config(tmp_path / "copy") == config()
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()


def test_saving_keeps_what_was_not_loaded(tmp_path: Path) -> None:
    weights = load_weights(FOLDER, config(), skip_draft=True, skip_vision=True)
    save_weights(weights, tmp_path / "copy")
    assert stored(tmp_path / "copy") == stored(FOLDER)


def test_saving_writes_what_is_in_memory(tmp_path: Path) -> None:
    weights = load_weights(FOLDER, config())
    weights.tensors["norm.weight"][3] = 7.0
    save_weights(weights, tmp_path / "copy")
    before, after = stored(FOLDER), stored(tmp_path / "copy")
    different = {name for name in before if before[name] != after[name]}
    assert different == {"norm.weight"}


def test_weights_that_were_taken_out_cannot_be_saved(tmp_path: Path) -> None:
    weights = load_weights(FOLDER, config())
    del weights.tensors["norm.weight"]
    with pytest.raises(UserError, match=r"norm\.weight is not among the loaded weights"):
        save_weights(weights, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# ----------------------------------------------------------------------------------------------------------- memory

# VmHWM rather than ru_maxrss: the latter starts at what the parent process had when it forked
MEASURE = """
import json, sys
from pathlib import Path
import torch
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.weights import load_weights

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))

config = load_config(sys.argv[1])
warm_up = torch.zeros(8).view(torch.uint8).float()
before = memory("VmRSS")
weights = load_weights(sys.argv[1], config)
sizes = [tensor.numel() * tensor.element_size() for tensor in weights.tensors.values()]
print(json.dumps({"grown": memory("VmHWM") - before, "total": sum(sizes), "largest": max(sizes)}))
"""
SLACK_BYTES = 24 * 2**20  # allocator, headers, imports that happen late


def wide_config() -> Config:
    """About 160 MB, the largest tensor 40 MB, and an n-gram table of 40 MB that is not to be read."""
    small = tiny_config(vocab_size=80_000, hidden_size=256, n_routed_experts=64, moe_intermediate_size=256)
    assert small.draft is not None
    return replace(small, draft=replace(small.draft, markov_rank=64))


def test_loading_takes_no_more_memory_than_the_tensors_and_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the largest tensor comes last, so that a second copy of it would raise the peak
    backwards = list(expected_tensors(wide_config()))[::-1]
    monkeypatch.setattr(synth, "expected_tensors", lambda _: backwards)
    synth.write_checkpoint(wide_config(), tmp_path / "wide", max_shard_bytes=30 * 2**20)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "wide")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    figures = json.loads(done.stdout)
    assert figures["total"] > 140 * 2**20
    assert figures["largest"] > 35 * 2**20
    assert figures["grown"] <= figures["total"] + figures["largest"] + SLACK_BYTES
    # no second copy even of the largest tensor: it is read where it stays
    assert figures["grown"] <= figures["total"] + SLACK_BYTES


def test_mapped_tables_do_not_count(tmp_path: Path) -> None:
    rows = list(table_rows(100_003, 2, 4, 2))
    large = tiny_config(engram_vocab_size=100_003, engram_num_embeddings=rows)
    synth.write_checkpoint(large, tmp_path / "tables")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "tables")]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert sum(rows) * 33 > 35e6
    assert figures["grown"] <= figures["total"] + SLACK_BYTES
