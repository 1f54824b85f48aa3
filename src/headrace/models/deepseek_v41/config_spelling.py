"""How the two published configuration files spell the same values.

The nested file (Hugging Face) is the canonical spelling; the flat one (the release's `inference/config.json`) is mapped
onto it. Data only. Source: spec section 1.
"""

from types import MappingProxyType

FLAT = MappingProxyType(
    {
        "hidden_size": "dim",
        "moe_intermediate_size": "moe_inter_dim",
        "num_hidden_layers": "n_layers",
        "num_nextn_predict_layers": "n_mtp_layers",
        "num_attention_heads": "n_heads",
        "num_experts_per_tok": "n_activated_experts",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "qk_rope_head_dim": "rope_head_dim",
        "rms_norm_eps": "norm_eps",
        "sliding_window": "window_size",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "engram_pad_token_id": "engram_pad_id",
        "dspark_num_experts_per_tok": "dspark_n_activated_experts",
        "dspark_target_layer_ids": "dspark_target_layer_ids",
        "max_position_embeddings": "max_seq_len",
    }
)
FLAT_ROPE = MappingProxyType({"original_max_position_embeddings": "original_seq_len", "factor": "rope_factor"})
FLAT_VISION = MappingProxyType(
    {
        "num_hidden_layers": "vision_n_layers",
        "hidden_size": "vision_dim",
        "num_attention_heads": "vision_n_heads",
        "intermediate_size": "vision_inter_dim",
        "patch_size": "vision_patch_size",
        "rope_theta": "vision_rope_theta",
        "downsample_ratio": "vision_downsample_ratio",
        "max_image_tokens": "vision_max_n_token",
        "min_pixels": "vision_min_pixels",
        "max_wh_ratio": "vision_max_wh_ratio",
    }
)

ENGRAM_KEYS = (
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
)
DRAFT_KEYS = (
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)

# Keys that change nothing here, each with the reason.
IGNORED_ROOT = MappingProxyType(
    {
        "architectures": "model_type decides",
        "transformers_version": "says which program wrote the file",
        "_name_or_path": "says where the file came from",
        "auto_map": "names code of another library; headrace runs none",
    }
)
IGNORED_TEXT = MappingProxyType(
    {
        "initializer_range": "used when training starts, not when weights are loaded",
        "use_cache": "a habit of another library; headrace always caches",
        "attention_dropout": "used in training only",
    }
)
IGNORED_FLAT = MappingProxyType({"max_batch_size": "sizes buffers of another program"})
