import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.checkpoint.catalog import open_catalog
from headrace.core.errors import UserError
from headrace.core.spec import TensorSpec
from headrace.models.deepseek_v41.check import verify_catalog
from headrace.models.deepseek_v41.config import Config, from_json, load_config, table_rows, to_json
from headrace.models.deepseek_v41.reference import model
from headrace.models.deepseek_v41.synth import write_checkpoint
from headrace.models.deepseek_v41.synth_numbers import PIECE_ELEMENTS, Draw, code_scale, recipe_of
from headrace.models.deepseek_v41.weights import load_weights
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import config as golden_config
from tests.release import DOCUMENT

FROZEN_BYTES = [230, 95, 234, 117, 99, 232, 222, 233]


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(3),
        tiny_config(4, vision=False, draft=False),
        tiny_config(2, engram=False, candidate_source_layer_id=-1),
        golden_config(),
    ],
    ids=["three streams", "no vision, no draft", "no engram", "golden"],
)
def test_a_checkpoint_of_any_configuration_passes_every_check(tmp_path: Path, config: Config) -> None:
    folder = tiny_checkpoint(tmp_path, config)
    assert load_config(folder) == config
    catalog = open_catalog(folder)
    verify_catalog(catalog, config)
    assert load_weights(folder, config).tensors
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer.size == config.vocab_size
    if config.engram:
        assert build_token_map(tokenizer)[1] == config.engram.compressed_vocab_size
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_the_seed_decides_every_byte_and_shards_none(tmp_path: Path) -> None:
    config = tiny_config()
    for name, seed, limit in (("a", 5, 2**30), ("b", 5, 300_000), ("c", 6, 2**30)):
        write_checkpoint(config, tmp_path / name, seed=seed, max_shard_bytes=limit)
    a, c = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    shards = sorted((tmp_path / "b").glob("model-*.safetensors"))
    assert len(shards) > 5
    b = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert a.keys() == b.keys() == c.keys()
    for name, tensor in a.items():
        bits = tensor.reshape(-1).view(torch.uint8)
        assert bits.equal(b[name].reshape(-1).view(torch.uint8)), name
        assert name.endswith(".scale") or not bits.equal(c[name].reshape(-1).view(torch.uint8)), name
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "c" / "tokenizer.json").read_bytes()


def test_the_first_bytes_of_a_seed_are_frozen() -> None:
    """A figure that was measured on a synthetic model must be repeatable next year."""
    spec = TensorSpec("layers.0.attn.wkv.weight", (32, 64), "F8_E4M3")
    piece = next(iter(Draw(7, spec.name).pieces(spec, 64)))
    assert piece[:8].tolist() == FROZEN_BYTES


def test_a_large_tensor_comes_in_pieces_of_bounded_size() -> None:
    for dtype, width in (("I8", 1), ("F8_E4M3", 1), ("BF16", 2), ("F32", 4), ("F8_E8M0", 1)):
        spec = TensorSpec("x.scale" if dtype == "F8_E8M0" else "x", (2 * PIECE_ELEMENTS + 3,), dtype)
        sizes = [piece.nbytes for piece in Draw(0, spec.name).pieces(spec, 64)]
        assert sizes == [PIECE_ELEMENTS * width, PIECE_ELEMENTS * width, 3 * width], dtype


def dequantised(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scale = tensors[f"{name}.scale"].float()
    codes = tensors[f"{name}.weight"].float()
    return codes * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: codes.shape[0], : codes.shape[1]]


def test_values_have_the_spread_their_recipe_names(tmp_path: Path) -> None:
    tensors = load_file(tiny_checkpoint(tmp_path, golden_config()) / "model.safetensors")
    for name in ("layers.3.attn.wq_b", "layers.3.attn.wkv", "mtp.0.main_proj", "layers.2.ffn.shared_experts.w2"):
        values = dequantised(tensors, name)
        assert float(values.std()) == pytest.approx(recipe_of(f"{name}.weight", values.shape[1]).std, rel=0.2), name
        assert len(tensors[f"{name}.scale"].view(torch.uint8).unique()) > 1, "scales must differ from block to block"
    for name in ("embed.weight", "layers.2.attn_norm.weight", "layers.2.hc_attn_fn"):
        recipe = recipe_of(name, tensors[name].shape[-1])
        assert float(tensors[name].float().std()) == pytest.approx(recipe.std, rel=0.15), name
        assert float(tensors[name].float().mean()) == pytest.approx(recipe.mean, abs=recipe.std / 4), name
    codes = tensors["layers.2.ffn.experts.0.w1.weight"].view(torch.uint8)
    assert len(codes.unique()) == 256


@pytest.mark.parametrize("std", [1e-4, 0.01, 0.5, 1.0, 3.7, 100.0])
def test_a_spread_splits_into_codes_within_range_and_a_power_of_two(std: float) -> None:
    codes, exponent = code_scale(std)
    assert 64 <= codes < 128.001
    assert codes * 2.0**exponent == pytest.approx(code_scale(1.0)[0] * 2.0 ** code_scale(1.0)[1] * std)


def deep_config() -> Config:
    """The 40 released layers at a fraction of their width."""
    document = to_json(from_json(DOCUMENT))
    document["text_config"] |= {
        "vocab_size": 400,
        "hidden_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "engram_layer_ids": [],
        "dspark_block_size": 0,
    }
    document["vision_config"] = {"num_hidden_layers": 0}
    document["image_token_id"] = 399
    return from_json(document)


@pytest.mark.parametrize("config", [tiny_config(), deep_config()], ids=["tiny", "40 layers"])
def test_activations_stay_finite_and_every_choice_is_one(tmp_path: Path, config: Config) -> None:
    folder = tiny_checkpoint(tmp_path, config)
    weights = load_file(folder / "model.safetensors")
    token_map = torch.from_numpy(build_token_map(Tokenizer.from_file(folder))[0])
    num_tokens = 60
    ids = np.random.default_rng(1).integers(0, config.vocab_size, num_tokens).tolist()
    record = model.forward(weights, config, ids, token_map=token_map)
    for name, tensor in record.items():
        if tensor.is_floating_point() and not name.endswith("index_score"):
            assert tensor.isfinite().all(), name
    for layer_id in range(config.num_layers):
        for part in ("attn_out", "ffn_out"):
            size = record[f"layers.{layer_id}.{part}"].float().square().mean().sqrt()
            assert 0.01 < size < 2, f"{part} of layer {layer_id} is {size:.3f}"
        mixes = record[f"layers.{layer_id}.pre_out"][0]
        assert mixes.std(dim=0).mean() > 0.02, "stream mixes must differ from token to token"
    late = [record[f"layers.{source}.topk"][0, -20:] for source in config.index_sources]
    for picks in late:
        assert len({tuple(row.tolist()) for row in picks}) > 12, "picks must differ from token to token"
    assert any(not first.equal(later) for first, later in pairwise(late) if first.shape == later.shape)
    logits = record["logits_all"][0]
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(dim=-1).tolist())) > num_tokens // 3


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UserError, match=f"the seed is {seed}; 0 to"):
        write_checkpoint(tiny_config(), tmp_path / "out", seed=seed)
    assert not (tmp_path / "out").exists()


def test_progress_reports_every_byte(tmp_path: Path) -> None:
    done: list[int] = []
    write_checkpoint(tiny_config(), tmp_path / "out", progress=done.append)
    assert sum(done) == open_catalog(tmp_path / "out").total_bytes


WRITE_LIMITED = """
import resource, sys
from pathlib import Path
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.synth import write_checkpoint
config = load_config(Path(sys.argv[1]))
write_checkpoint(config, Path(sys.argv[2]) / "first")  # tables of quantiles and the like
taken = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (taken + (64 << 20),) * 2)
write_checkpoint(load_config(Path(sys.argv[3])), Path(sys.argv[2]) / "large")
"""


def test_tables_larger_than_the_memory_there_is(tmp_path: Path) -> None:
    """200 MB of tables, written by a process that gets no more than 64 MB."""
    rows = list(table_rows(520_000, 2, 4, 2))
    for name, config in (
        ("small", tiny_config(vision=False, draft=False)),
        ("large", tiny_config(vision=False, draft=False, engram_vocab_size=520_000, engram_num_embeddings=rows)),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(to_json(config)), encoding="utf-8")
    command = [
        sys.executable,
        "-c",
        WRITE_LIMITED,
        *(str(tmp_path / name) for name in ("small.json", ".", "large.json")),
    ]
    subprocess.run(command, check=True, timeout=300)
    assert sum(file.stat().st_size for file in (tmp_path / "large").iterdir()) > 200e6
