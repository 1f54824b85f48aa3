"""Read and write the configuration of a DeepSeek-V4.1-Flash checkpoint.

Both published spellings are read: nested (Hugging Face) and flat (the release's `inference/config.json`). Unknown keys,
missing keys, and values headrace does not implement are refused by name; nothing is guessed but the defaults that the
specification gives. Source: spec section 1. Read `architecture.py` before and `config_rules.py` after.
"""

from pathlib import Path
from typing import Any

from headrace.core.errors import UserError
from headrace.core.formats import BLOCK
from headrace.core.strict_json import read_json
from headrace.models.deepseek_v41.architecture import Config, Draft, Engram, Vision, Yarn
from headrace.models.deepseek_v41.config_fields import REQUIRED, Fields
from headrace.models.deepseek_v41.config_rules import check, table_rows
from headrace.models.deepseek_v41.config_spelling import (
    DRAFT_KEYS,
    ENGRAM_KEYS,
    FLAT,
    FLAT_ROPE,
    FLAT_VISION,
    IGNORED_FLAT,
    IGNORED_ROOT,
    IGNORED_TEXT,
)

__all__ = [
    "Config",
    "Draft",
    "Engram",
    "Vision",
    "Yarn",
    "MODEL_TYPE",
    "check",
    "config_path",
    "from_json",
    "load_config",
    "table_rows",
    "to_json",
]

MODEL_TYPE = "deepseek_v41"
_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_LAYERS = 512
_MAX_EXPERTS = 4096


def config_path(path: Path) -> Path:
    """Return the configuration file of a checkpoint folder, or the file itself.

    Raises:
        UserError: there is no such file or folder, or the folder holds no configuration.
    """
    if path.is_dir():
        for name in ("config.json", "inference_config.json"):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path} holds no config.json, so it is not a checkpoint folder.")
    if not path.exists():
        raise UserError(f"{path} does not exist; a checkpoint folder or a config.json is accepted.")
    if path.suffix == ".safetensors":
        raise UserError(f"{path} holds weights; the folder it lies in, or a config.json, is accepted.")
    return path


def load_config(path: Path | str) -> Config:
    """Read the configuration of a checkpoint folder, or a single configuration file, in either spelling.

    Raises:
        UserError: the file is missing or not strict JSON, a key is missing or unknown, or a value is refused.
    """
    file = config_path(Path(path))
    return from_json(read_json(file, max_bytes=_MAX_CONFIG_BYTES), str(file))


def from_json(values: Any, where: str = "the configuration") -> Config:
    """Build a configuration from a parsed document in either spelling.

    Args:
        values: what the file holds.
        where: how to name the file in a refusal.

    Raises:
        UserError: a key is missing or unknown, or a value is refused.
    """
    root = Fields(values, where)
    if root.has("text_config"):
        config = _from_nested(root)
    elif root.has("dim"):
        config = _from_flat(root)
    else:
        if root.has("model_type"):
            root.constant("model_type", MODEL_TYPE)
        raise UserError(
            f"{where} has neither text_config (nested spelling) nor dim (flat spelling), so it does not describe a "
            f"{MODEL_TYPE} model."
        )
    try:
        check(config)
    except UserError as problem:
        raise UserError(f"{where}: {problem.message}", param=problem.param) from None
    return config


def _from_nested(root: Fields) -> Config:
    root.constant("model_type", MODEL_TYPE)
    root.constant("dtype", "bfloat16", default="bfloat16")
    quantization = root.section("quantization_config")
    quantization.constant("quant_method", "fp8")
    quantization.constant("activation_scheme", "dynamic", default="dynamic")
    quantization.constant("weight_block_size", [BLOCK, BLOCK])
    quantization.constant("scale_fmt", "ue8m0")
    quantization.constant("expert_dtype", "fp4")
    quantization.finish({})

    text = root.section("text_config")
    text.constant("model_type", "deepseek_v41_text", default="deepseek_v41_text")
    text.constant("dtype", "bfloat16", default="bfloat16")
    text.constant("num_key_value_heads", 1)
    text.constant("hidden_act", "silu")
    text.constant("topk_method", "noaux_tc")
    text.constant("norm_topk_prob", True)
    text.constant("attention_bias", False, default=False)
    text.constant("tie_word_embeddings", False, default=False)
    rope = text.section("rope_scaling")
    rope.constant("rope_type", "yarn")

    vision = root.section("vision_config", may_be_absent=True)
    vision.constant("model_type", "deepseek_v41_vision", default="deepseek_v41_vision")
    config = _read(text, rope, vision, tokens=root, flat=False)
    for fields, ignored in ((rope, {}), (text, IGNORED_TEXT), (vision, {}), (root, IGNORED_ROOT)):
        fields.finish(ignored)
    return config


def _from_flat(root: Fields) -> Config:
    root.constant("model_type", MODEL_TYPE, default=MODEL_TYPE)
    root.constant("dtype", "fp8", default="fp8")
    root.constant("scale_fmt", "ue8m0", default="ue8m0")
    root.constant("expert_dtype", "fp4", default="fp4")
    text = root.view(FLAT)
    config = _read(text, root.view(FLAT_ROPE), root.view(FLAT_VISION), tokens=root, flat=True)
    root.finish(IGNORED_FLAT)
    return config


def _read(text: Fields, rope: Fields, vision: Fields, *, tokens: Fields, flat: bool) -> Config:
    """Read the values both spellings share; only the flat file may leave out token ids and the context length."""
    text.constant("scoring_func", "sqrtsoftplus")
    text.constant("n_shared_experts", 1)
    yarn = Yarn(
        factor=rope.number("factor"),
        beta_fast=rope.number("beta_fast"),
        beta_slow=rope.number("beta_slow"),
        original_positions=rope.integer("original_max_position_embeddings"),
    )
    num_layers = text.integer("num_hidden_layers", high=_MAX_LAYERS)
    experts, chosen = text.integer("n_routed_experts", high=_MAX_EXPERTS), text.integer("num_experts_per_tok")
    tower = _read_vision(vision)
    draft = _read_draft(text, experts, chosen)
    source = text.integer("candidate_source_layer_id", low=-1, default=-1)
    pool = REQUIRED if source >= 0 else 0
    extent = int(yarn.factor * yarn.original_positions)  # the flat file names no context length: YaRN's reach
    return Config(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_lora_rank=text.integer("q_lora_rank"),
        o_lora_rank=text.integer("o_lora_rank"),
        o_groups=text.integer("o_groups"),
        window=text.integer("sliding_window"),
        norm_eps=text.number("rms_norm_eps"),
        max_positions=text.integer("max_position_embeddings", default=extent if flat else REQUIRED),
        rope_theta=text.number("rope_theta", above=1.0),
        compress_rope_theta=text.number("compress_rope_theta", above=1.0),
        yarn=yarn,
        compress_ratios=_read_ratios(text, num_layers, draft),
        kv_sources=text.integers("kv_source_layer_ids"),
        index_sources=text.integers("index_source_layer_ids"),
        index_heads=text.integer("index_n_heads"),
        index_head_dim=text.integer("index_head_dim"),
        index_topk=text.integer("index_topk"),
        candidate_source=source if source >= 0 else None,
        candidate_blocks=text.integer("candidate_topk_blocks", low=1 if source >= 0 else 0, default=pool),
        candidate_block_size=text.integer("candidate_block_size", low=1 if source >= 0 else 0, default=pool),
        num_experts=experts,
        experts_per_token=chosen,
        expert_dim=text.integer("moe_intermediate_size"),
        route_scale=text.number("routed_scaling_factor"),
        swiglu_limit=text.number("swiglu_limit", zero=True),
        num_streams=text.integer("hc_mult", high=64),
        sinkhorn_iterations=text.integer("hc_sinkhorn_iters", high=1000),
        hc_eps=text.number("hc_eps"),
        engram=_read_engram(text),
        draft=draft,
        vision=tower,
        bos_token_id=tokens.integer("bos_token_id", low=0, default=0 if flat else REQUIRED),
        eos_token_id=tokens.integer("eos_token_id", low=0, default=1 if flat else REQUIRED),
        pad_token_id=tokens.integer("pad_token_id", low=0, default=2 if flat else REQUIRED),
        image_token_id=tokens.integer("image_token_id", low=0) if tower or tokens.has("image_token_id") else None,
    )


def _read_ratios(text: Fields, num_layers: int, draft: Draft | None) -> tuple[int, ...]:
    ratios = text.integers("compress_ratios")
    unused = 0 if draft else text.integer("num_nextn_predict_layers", low=0, high=_MAX_LAYERS, default=0)
    # a draft module that is switched off has no use for its layers' ratios
    return ratios[:num_layers] if len(ratios) == num_layers + unused else ratios


def _read_engram(text: Fields) -> Engram | None:
    layer_ids = text.integers("engram_layer_ids", default=())
    if not layer_ids:
        text.skip(ENGRAM_KEYS)
        return None
    return Engram(
        layer_ids=layer_ids,
        num_embeddings=text.integers("engram_num_embeddings", low=1, high=2**48),
        max_ngram=text.integer("engram_max_ngram_size", low=2, high=16),
        first_prime_above=text.integer("engram_vocab_size", low=2),
        num_hashes=text.integer("engram_n_heads", high=256),
        head_dim=text.integer("engram_head_dim"),
        pad_token_id=text.integer("engram_pad_token_id", low=0, default=2),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size"),
    )


def _read_draft(text: Fields, experts: int, chosen: int) -> Draft | None:
    num_layers = text.integer("num_nextn_predict_layers", low=0, high=_MAX_LAYERS, default=0)
    block_size = text.integer("dspark_block_size", low=0, high=1024, default=REQUIRED if num_layers else 0)
    if block_size == 0:
        text.skip(DRAFT_KEYS)
        return None
    if num_layers == 0:
        raise text.refuse("num_nextn_predict_layers", "drafting (dspark_block_size above 0) needs at least one layer")
    return Draft(
        num_layers=num_layers,
        block_size=block_size,
        noise_token_id=text.integer("dspark_noise_token_id", low=0),
        tap_layers=text.integers("dspark_target_layer_ids"),
        markov_rank=text.integer("dspark_markov_rank"),
        num_experts=text.integer("dspark_n_routed_experts", low=0, high=_MAX_EXPERTS, default=0) or experts,
        experts_per_token=text.integer("dspark_num_experts_per_tok", low=0, default=0) or chosen,
    )


def _read_vision(vision: Fields) -> Vision | None:
    if vision.integer("num_hidden_layers", low=0, high=_MAX_LAYERS, default=0) == 0:
        vision.skip(FLAT_VISION)
        return None
    return Vision(
        num_layers=vision.integer("num_hidden_layers", low=0, high=_MAX_LAYERS),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_attention_heads"),
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size", high=1024),
        rope_theta=vision.number("rope_theta", above=1.0),
        downsample=vision.integer("downsample_ratio", high=1024),
        max_image_tokens=vision.integer("max_image_tokens", low=4),
        min_pixels=vision.integer("min_pixels", low=0),
        max_wh_ratio=vision.optional_number("max_wh_ratio"),
    )


def to_json(config: Config) -> dict[str, Any]:
    """Return the nested document of a configuration; reading it again gives an equal configuration."""
    document: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if config.image_token_id is not None:
        document["image_token_id"] = config.image_token_id
    document["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [config.block, config.block],
        "scale_fmt": "ue8m0",
        "expert_dtype": config.expert_dtype,
    }
    document["text_config"] = _text_json(config) | _engram_json(config.engram) | _draft_json(config.draft)
    document["vision_config"] = _vision_json(config.vision)
    return document


def _text_json(config: Config) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.expert_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "q_lora_rank": config.q_lora_rank,
        "o_lora_rank": config.o_lora_rank,
        "o_groups": config.o_groups,
        "hidden_act": "silu",
        "swiglu_limit": config.swiglu_limit,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "original_max_position_embeddings": config.yarn.original_positions,
        },
        "compress_rope_theta": config.compress_rope_theta,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.experts_per_token,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.route_scale,
        "sliding_window": config.window,
        "compress_ratios": list(config.compress_ratios),
        "kv_source_layer_ids": list(config.kv_sources),
        "index_source_layer_ids": list(config.index_sources),
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "candidate_source_layer_id": -1 if config.candidate_source is None else config.candidate_source,
        "candidate_topk_blocks": config.candidate_blocks,
        "candidate_block_size": config.candidate_block_size,
        "hc_mult": config.num_streams,
        "hc_sinkhorn_iters": config.sinkhorn_iterations,
        "hc_eps": config.hc_eps,
    }


def _engram_json(engram: Engram | None) -> dict[str, Any]:
    if engram is None:
        return {"engram_layer_ids": []}
    return {
        "engram_layer_ids": list(engram.layer_ids),
        "engram_num_embeddings": list(engram.num_embeddings),
        "engram_max_ngram_size": engram.max_ngram,
        "engram_vocab_size": engram.first_prime_above,
        "engram_n_heads": engram.num_hashes,
        "engram_head_dim": engram.head_dim,
        "engram_pad_token_id": engram.pad_token_id,
        "engram_compressed_vocab_size": engram.compressed_vocab_size,
    }


def _draft_json(draft: Draft | None) -> dict[str, Any]:
    if draft is None:
        return {"num_nextn_predict_layers": 0, "dspark_block_size": 0}
    return {
        "num_nextn_predict_layers": draft.num_layers,
        "dspark_block_size": draft.block_size,
        "dspark_noise_token_id": draft.noise_token_id,
        "dspark_target_layer_ids": list(draft.tap_layers),
        "dspark_markov_rank": draft.markov_rank,
        "dspark_n_routed_experts": draft.num_experts,
        "dspark_num_experts_per_tok": draft.experts_per_token,
    }


def _vision_json(vision: Vision | None) -> dict[str, Any]:
    if vision is None:
        return {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0}
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "num_attention_heads": vision.num_heads,
        "intermediate_size": vision.intermediate_size,
        "patch_size": vision.patch_size,
        "rope_theta": vision.rope_theta,
        "downsample_ratio": vision.downsample,
        "max_image_tokens": vision.max_image_tokens,
        "min_pixels": vision.min_pixels,
        "max_wh_ratio": vision.max_wh_ratio,
    }
