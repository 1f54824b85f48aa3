"""Facts of every family, held against totals that the specifications took from the released checkpoints."""

import json
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import from_json
from headrace.models.deepseek_v41.inspect import report
from headrace.plan.facts import DRAFT, EXPERTS, TABLES, VISION, Facts
from headrace.plan.families import read, read_model, released
from headrace.plan.released import EARLIER, RELEASED, released_config
from tests.release import DOCUMENT

PARAMETER_DIGITS = 0.005e9  # the specifications give billions with two decimals


def parameters(facts: Facts, *kinds: str) -> int:
    return sum(part.parameters for part in facts.weights if part.kind in kinds)


def num_tensors(facts: Facts, *without: str) -> int:
    return sum(part.num_tensors for part in facts.weights if part.kind not in without)


def test_the_shipped_v41_configuration_is_the_released_one() -> None:
    assert from_json(released_config("deepseek-v4.1-flash")) == from_json(DOCUMENT)


def test_v41_says_what_inspect_says() -> None:
    facts, seen = released("deepseek-v4.1-flash"), report(from_json(DOCUMENT))
    assert facts.kv_bytes_per_token == seen["kv_bytes_per_token"] == 890
    assert facts.window_bytes == seen["window_bytes_per_sequence"]
    assert facts.state_bytes == seen["state_bytes_per_sequence"]
    assert facts.weight_bytes == seen["total_bytes"]
    assert num_tensors(facts) == seen["num_tensors"]
    assert facts.parameters == seen["parameters"]["total"]
    assert facts.active_parameters == seen["active_parameters"]["decode"]
    assert facts.prefill_parameters == seen["active_parameters"]["prefill"]
    for kind, name in ((EXPERTS, "routed_experts"), (TABLES, "engram_tables"), (DRAFT, "draft"), (VISION, "vision")):
        assert parameters(facts, kind) == seen["parameters"][name]
    for context in seen["contexts"]:
        assert facts.kv_bytes(context["tokens"]) == context["bytes"]


@pytest.mark.parametrize(
    ("name", "backbone", "draft", "active", "kv", "window", "state"),
    [
        ("deepseek-v4-flash", 284.33, 6.61, 13.27, Fraction(351425, 100), 3_214_336, 11.64),
        ("deepseek-v4-pro", 1572.995, 25.84, 48.85, Fraction(50314375, 10000), 4_559_872, 17.84),
    ],
)
def test_v4_adds_up_to_what_its_specification_says(
    name: str, backbone: float, draft: float, active: float, kv: Fraction, window: int, state: float
) -> None:
    facts = released(name)
    assert abs(facts.parameters - parameters(facts, DRAFT) - backbone * 1e9) <= PARAMETER_DIGITS
    assert abs(parameters(facts, DRAFT) - draft * 1e9) <= PARAMETER_DIGITS
    assert abs(facts.active_parameters - active * 1e9) <= PARAMETER_DIGITS
    assert facts.kv_bytes_per_token == kv
    assert facts.window_bytes == window
    assert round(facts.state_bytes / 2**20, 2) == state


def test_an_entry_counts_once_all_its_tokens_are_there() -> None:
    v41, flash = released("deepseek-v4.1-flash"), released("deepseek-v4-flash")
    assert [v41.kv_bytes(tokens) for tokens in (0, 1, 2, 3)] == [0, 356, 4 * 356 + 356, 4 * 356 + 2 * 356]
    assert [flash.kv_bytes(tokens) for tokens in (3, 4, 127)] == [0, 21 * 652, 31 * 21 * 652]
    assert flash.kv_bytes(128) == 32 * 21 * 652 + 20 * 584


def test_v4_flash_has_as_many_tensors_and_gibibytes_as_the_release() -> None:
    facts = released("deepseek-v4-flash")
    assert num_tensors(facts) == 69_187
    assert 0 <= 148.66 - facts.weight_bytes / 2**30 < 0.015  # the files also hold their headers


def test_qwen_adds_up_to_what_its_specification_says() -> None:
    facts = released("qwen3.8-flash-next")
    assert num_tensors(facts, DRAFT) == 1_294
    assert num_tensors(facts) - num_tensors(facts, DRAFT) == 31
    assert facts.weight_bytes - sum(part.num_bytes for part in facts.weights if not part.parameters) == (
        2 * facts.parameters
    )
    vision = 359_999_962_848 // 2 - facts.parameters  # the release holds a tower that the configuration does not name
    assert abs(vision - 0.449e9) <= 0.0005e9
    for kind, billions in ((EXPERTS, 120.80), (TABLES, 51.20), ("linear attention", 2.09), (DRAFT, 2.607)):
        assert abs(parameters(facts, kind) - billions * 1e9) <= PARAMETER_DIGITS
    assert [table.num_rows for table in facts.tables] == [320_001_536]
    assert facts.kv_bytes_per_token == 25_344
    sizes = {part.name: (part.layers, part.num_bytes) for part in facts.state}
    assert sizes["recurrent state"] == (36, 3 * 2**20)
    assert sizes["convolution state"] == (36, 61_440)
    assert sizes["n-gram convolution state"] == (1, 184_320)


def test_earlier_generations_cache_what_the_reports_say() -> None:
    v32, v1 = (released(name) for name in EARLIER)
    assert v32.kv_bytes_per_token == 48_068
    assert v1.kv_bytes_per_token == 389_120
    assert round(v32.parameters / 1e9) == 672  # 671 B and the index
    assert round(v32.active_parameters / 1e9) == 37


@pytest.mark.parametrize("name", RELEASED)
def test_kinds_add_up_and_shares_are_shares(name: str) -> None:
    facts = released(name)
    assert sum(facts.num_bytes(kind) for kind in {part.kind for part in facts.weights}) == facts.weight_bytes
    assert all(0 <= part.share <= 1 for part in facts.weights)
    assert facts.kv_bytes(1 << 20) == facts.kv_bytes_per_token * (1 << 20)
    assert facts.active_parameters < facts.parameters


def test_a_name_a_folder_and_a_file_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(released_config("deepseek-v4-flash")))
    by_name = read_model("DeepSeek-V4-Flash")
    for place in (tmp_path, file):
        facts = read_model(str(place))
        assert (facts.weights, facts.growing, facts.scans) == (by_name.weights, by_name.growing, by_name.scans)


def changed(name: str, **values: Any) -> dict[str, Any]:
    document = deepcopy(released_config(name))
    part = document.get("text_config", document)
    part.update(values)
    return document


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ([], "JSON object"),
        ({}, "model_type is None"),
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": ["deepseek_v4"]}, "model_type"),
        ({"model_type": "deepseek_v4"}, "missing"),
        (changed("deepseek-v4-flash", num_hidden_layers=42), "compress_ratios"),
        (changed("deepseek-v4-flash", num_experts_per_tok=999), "num_experts_per_tok"),
        (changed("deepseek-v4-flash", num_hash_layers=44), "num_hash_layers"),
        (changed("deepseek-v4-flash", expert_dtype="fp8"), "expert_dtype"),
        (changed("deepseek-v4-flash", hidden_size=4096.0), "hidden_size"),
        (changed("qwen3.8-flash-next", layer_types=["full_attention"]), "layer_types"),
        (changed("qwen3.8-flash-next", ngram_size=1), "ngram_size"),
        (changed("qwen3.8-flash-next", ple_embed_dim=2561), "ple_embed_dim"),
        (changed("qwen3.8-flash-next", num_experts_per_tok=513), "num_experts_per_tok"),
        (released_config("qwen3.8-flash-next") | {"quantization_config": {}}, "quantization_config"),
        (released_config("qwen3.8-flash-next") | {"text_config": 3}, "text_config"),
        (changed("deepseek-v4.1-flash", kv_source_layer_ids=[99]), "kv_source"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_by_name(document: Any, word: str) -> None:
    with pytest.raises(UserError, match=r"the file.*") as refusal:
        read(document, "the file")
    assert word in refusal.value.message
    assert refusal.value.message.endswith(".")
