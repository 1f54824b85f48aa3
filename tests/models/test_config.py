import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import Config, from_json, load_config, to_json
from tests.factories import tiny_config, tiny_document
from tests.golden_mini import FOLDER
from tests.release import DOCUMENT

FLAT = json.loads((FOLDER / "inference_config.json").read_text())


def changed(path: str, value: Any, document: dict[str, Any] = DOCUMENT) -> dict[str, Any]:
    """Return the document with the value at a dotted path replaced; `del` removes it."""
    result = copy.deepcopy(document)
    *sections, key = path.split(".")
    place = result
    for section in sections:
        place = place[section]
    if value is del_:
        del place[key]
    else:
        place[key] = value
    return result


del_ = object()


def test_the_released_configuration_is_read() -> None:
    config = from_json(DOCUMENT)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_streams) == (5120, 40, 64, 4)
    assert (config.rope_dim, config.window, config.norm_eps, config.max_positions) == (64, 128, 1e-20, 1_048_576)
    assert (config.yarn.factor, config.yarn.original_positions) == (16, 65_536)
    assert config.cut == config.candidate_source == 20
    assert config.mix_width == 24
    assert config.num_draft_layers == 3
    assert config.engram is not None
    assert config.engram.num_columns == 24
    assert config.draft is not None
    assert (config.draft.block_size, config.draft.num_experts, config.draft.experts_per_token) == (5, 128, 3)
    assert config.vision is not None
    assert config.vision.max_wh_ratio is None


def test_both_spellings_of_the_golden_configuration_mean_the_same() -> None:
    nested = load_config(FOLDER)
    flat = load_config(FOLDER / "inference_config.json")
    # the flat file names no context length; what its YaRN reaches stands in
    assert flat.max_positions == 4 * 64
    assert flat == from_json(changed("text_config.max_position_embeddings", 256, to_json(nested)))
    assert load_config(str(FOLDER / "config.json")) == nested


def test_the_flat_file_may_name_formats_and_context() -> None:
    config = from_json(
        FLAT | {"max_seq_len": 160, "dtype": "fp8", "expert_dtype": "fp4", "scale_fmt": "ue8m0", "max_batch_size": 8}
    )
    assert config == load_config(FOLDER)
    with pytest.raises(UserError, match=r"dtype is 'bf16'; headrace implements 'fp8'"):
        from_json(FLAT | {"dtype": "bf16"})
    with pytest.raises(UserError, match=r"n_activated_experts is missing"):
        from_json({key: value for key, value in FLAT.items() if key != "n_activated_experts"})
    with pytest.raises(UserError, match=r"hidden_size is 256, a key headrace does not know"):
        from_json(FLAT | {"hidden_size": 256})


@pytest.mark.parametrize("config", [from_json(DOCUMENT), tiny_config(), tiny_config(4, vision=False, draft=False)])
def test_what_is_written_reads_back_equal(config: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
def test_the_number_of_streams_is_free(streams: int) -> None:
    assert tiny_config(streams).mix_width == (2 + streams) * streams


def test_parts_can_be_switched_off() -> None:
    config = from_json(changed("text_config.engram_layer_ids", []))
    assert config.engram is None
    config = from_json(changed("text_config.dspark_block_size", 0))
    assert config.draft is None
    assert len(config.compress_ratios) == 40
    config = from_json(changed("vision_config.num_hidden_layers", 0))
    assert config.vision is None
    assert from_json(changed("vision_config", del_)) == config
    assert from_json(changed("vision_config", None)) == config
    config = from_json(changed("text_config.candidate_source_layer_id", -1))
    assert config.candidate_source is None
    assert tiny_config(vision=False, draft=False, engram=False, candidate_source_layer_id=-1).num_draft_layers == 0


def test_a_draft_layer_may_route_like_the_backbone() -> None:
    document = changed("text_config.dspark_n_routed_experts", 0)
    document = changed("text_config.dspark_num_experts_per_tok", 0, document)
    draft = from_json(document).draft
    assert draft is not None
    assert (draft.num_experts, draft.experts_per_token) == (384, 6)


def keys(document: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in document.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += keys(value, f"{prefix}{key}.")
    return found


# What may be left out, with what stands in.
OPTIONAL = {
    "architectures",
    "dtype",
    "transformers_version",
    "quantization_config.activation_scheme",
    "text_config.model_type",
    "text_config.attention_bias",
    "text_config.attention_dropout",
    "text_config.initializer_range",
    "text_config.use_cache",
    "text_config.tie_word_embeddings",
    "text_config.engram_pad_token_id",
    "vision_config",
    "vision_config.model_type",
    "vision_config.max_wh_ratio",
    "vision_config.num_hidden_layers",
}
# What switches a part off when it is left out; its other keys are then without use and may stay.
SWITCHES = {"text_config.engram_layer_ids", "text_config.candidate_source_layer_id"}
# What means something else when it is left out, which the checkpoint's other numbers then contradict.
CONTRADICTED = {
    "text_config.num_nextn_predict_layers": "num_nextn_predict_layers",
    "text_config.dspark_n_routed_experts": None,
    "text_config.dspark_num_experts_per_tok": None,
}


@pytest.mark.parametrize("key", sorted(set(keys(DOCUMENT)) - OPTIONAL - SWITCHES - set(CONTRADICTED) - {"text_config"}))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(UserError, match=r"missing") as caught:
        from_json(changed(key, del_), "some/config.json")
    assert caught.value.message == f"some/config.json: {key} is missing."
    assert caught.value.param == key


@pytest.mark.parametrize("key", sorted(OPTIONAL | SWITCHES))
def test_an_optional_key_may_be_missing(key: str) -> None:
    from_json(changed(key, del_))


def test_a_draft_module_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match="num_nextn_predict_layers is None; drafting"):
        from_json(changed("text_config.num_nextn_predict_layers", del_))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("new_gate", 1),
        ("text_config.rope_interleave", False),
        ("text_config.rope_scaling.mscale", 1.0),
        ("quantization_config.modules_to_not_convert", ["head"]),
        ("vision_config.hidden_act", "gelu"),
    ],
)
def test_an_unknown_key_is_refused_with_its_value(key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        from_json(changed(key, value))
    assert f"{key} is {value!r}, a key headrace does not know" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v4"),
        ("dtype", "float16"),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float"),
        ("quantization_config.expert_dtype", "fp8"),
        ("text_config.model_type", "deepseek_v4_text"),
        ("text_config.num_key_value_heads", 2),
        ("text_config.hidden_act", "gelu"),
        ("text_config.n_shared_experts", 2),
        ("text_config.scoring_func", "softmax"),
        ("text_config.topk_method", "group_limited"),
        ("text_config.norm_topk_prob", False),
        ("text_config.norm_topk_prob", 1),
        ("text_config.attention_bias", True),
        ("text_config.tie_word_embeddings", True),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("vision_config.model_type", "siglip"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match="headrace implements") as caught:
        from_json(changed(key, value))
    assert caught.value.param == key
    assert repr(value) in caught.value.message


@pytest.mark.parametrize("value", [True, 1.0, "5120", None, [5120], -32, 0, 2**31, float("nan")])
def test_a_width_is_a_whole_number_in_range(value: Any) -> None:
    with pytest.raises(UserError, match=r"hidden_size is .*; a whole number from 1 to"):
        from_json(changed("text_config.hidden_size", value))


@pytest.mark.parametrize("value", [True, "x", None, [1.0], -1.0, 0.0, 1e-50, 1e39, 10**400, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["rms_norm_eps", "hc_eps", "routed_scaling_factor"])
def test_a_factor_is_a_positive_number_that_float32_holds(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{key} is .*; a number above 0 that float32 can hold"):
        from_json(changed(f"text_config.{key}", value))


def test_a_clamp_of_zero_means_none() -> None:
    assert from_json(changed("text_config.swiglu_limit", 0)).swiglu_limit == 0
    with pytest.raises(UserError, match="swiglu_limit is -1; a number above 0, or 0,"):
        from_json(changed("text_config.swiglu_limit", -1))


@pytest.mark.parametrize("value", [None, 3, "0,0", [0, True], [0, 1.0], [[0]], [-1], {}])
def test_a_list_is_one_of_whole_numbers(value: Any) -> None:
    with pytest.raises(UserError, match=r"kv_source_layer_ids is .*; a list of whole numbers"):
        from_json(changed("text_config.kv_source_layer_ids", value))


@pytest.mark.parametrize("value", [None, [], "x", 3])
@pytest.mark.parametrize("key", ["text_config", "quantization_config", "text_config.rope_scaling"])
def test_a_section_is_an_object(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{key} must be a JSON object, not"):
        from_json(changed(key, value))


@pytest.mark.parametrize("value", [[], 3, None, "x"])
def test_a_document_is_an_object(value: Any) -> None:
    with pytest.raises(UserError, match="must be a JSON object"):
        from_json(value)


def test_a_document_of_another_model_says_so() -> None:
    with pytest.raises(UserError, match=r"model_type is 'qwen4_exp'; headrace implements 'deepseek_v41'"):
        from_json({"model_type": "qwen4_exp", "hidden_size": 4096})
    with pytest.raises(UserError, match="neither text_config"):
        from_json({})


def test_a_long_value_is_cut_in_the_refusal() -> None:
    with pytest.raises(UserError) as caught:
        from_json(changed("text_config.hidden_act", "x" * 5000))
    assert len(caught.value.message) < 300


def test_a_missing_file_or_a_file_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_config(tmp_path)
    with pytest.raises(UserError, match="holds weights"):
        load_config(FOLDER / "model.safetensors")


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    text = json.dumps(tiny_document()).replace('"hc_mult": 3', '"hc_mult": 3, "hc_mult": 4')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="'hc_mult' stands twice"):
        load_config(tmp_path)
