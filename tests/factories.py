"""Small models for tests: configurations and checkpoints that obey every rule, and bite.

The sizes are pairwise different where the architecture allows it, so that a swapped axis cannot hide; three residual
streams, so that a transposed mixing matrix cannot hide; the window and the picks are small, so that prompts of a few
dozen tokens leave them behind.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

from headrace.models.deepseek_v41.config import Config, from_json, table_rows

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 320,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 48,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 5],
    "index_n_heads": 3,
    "index_head_dim": 32,
    "index_topk": 5,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 258,
    "engram_compressed_vocab_size": 280,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 319,
    "dspark_target_layer_ids": [5, 6],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 3,
}
_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}


def tiny_document(streams: int = 3) -> dict[str, Any]:
    """Return the nested document of `tiny_config`; change it and read it back with `from_json`."""
    rows = table_rows(101, num_layers=2, max_ngram=4, num_hashes=2)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "image_token_id": 259,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {**deepcopy(_TEXT), "engram_num_embeddings": list(rows), "hc_mult": streams},
        "vision_config": dict(_VISION),
    }


def tiny_config(
    streams: int = 3, *, vision: bool = True, draft: bool = True, engram: bool = True, **text: Any
) -> Config:
    """Return a configuration of 7 + 2 layers and about 1 M parameters.

    Args:
        streams: residual streams.
        vision: whether it has an image tower.
        draft: whether it has draft layers.
        engram: whether it has n-gram tables.
        text: further keys of `text_config` to set, in the nested spelling.
    """
    document = tiny_document(streams)
    if not vision:
        document["vision_config"] = {"num_hidden_layers": 0}
    if not draft:
        ratios = document["text_config"]["compress_ratios"]
        document["text_config"] |= {
            "num_nextn_predict_layers": 0,
            "dspark_block_size": 0,
            "compress_ratios": ratios[:7],
        }
    if not engram:
        document["text_config"]["engram_layer_ids"] = []
    document["text_config"] |= text
    return from_json(document)


def tiny_checkpoint(folder: Path, config: Config | None = None, seed: int = 0) -> Path:
    """Write a random checkpoint with its tokenizer into `folder` / "tiny" and return that folder."""
    from headrace.models.deepseek_v41.synth import write_checkpoint

    out = folder / "tiny"
    write_checkpoint(config or tiny_config(), out, seed=seed)
    return out
