from typing import Any

import pytest

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import from_json, table_rows
from tests.factories import tiny_document
from tests.release import TEXT

WIDTH_RULES = [
    ("hidden_size", 80, "multiple of 32"),
    ("q_lora_rank", 48, "multiple of 32"),
    ("o_lora_rank", 40, r"o_groups \* o_lora_rank 80"),
    ("moe_intermediate_size", 48, "multiple of 32"),
    ("head_dim", 48, "multiple of 32"),
    ("index_head_dim", 48, "multiple of 32"),
    ("num_attention_heads", 5, "num_attention_heads 5"),
    ("qk_rope_head_dim", 7, "even number up to 32"),
    ("qk_rope_head_dim", 34, "even number up to 32"),
    ("num_experts_per_tok", 9, "at most the 8 routed experts"),
    ("engram_head_dim", 48, "multiple of 32"),
]
SOURCE_RULES = [
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 0], "8 compress_ratios; 9 are expected"),
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 0, 0, 0], "10 compress_ratios; 9 are expected"),
    ("compress_ratios", [0, 2, 2, 2, 4, 4, 4, 0, 0], r"compress_ratios\[4\] 4; 0, 1 and 2"),
    ("compress_ratios", [0, 2, 2, 2, 1, 1, 1, 0, 1], r"compress_ratios\[8\] 1; a draft layer"),
    ("compress_ratios", [0, 2, 1, 2, 1, 1, 1, 0, 0], r"compress_ratios\[2\] 1; layers 1 to 2 share the KV of layer 1"),
    ("compress_ratios", [0, 2, 2, 2, 1, 0, 1, 0, 0], r"compress_ratios\[5\] 0; layers 4 to 6"),
    ("compress_ratios", [2, 2, 2, 2, 1, 1, 1, 0, 0], r"compress_ratios\[0\] 2; the first KV source is layer 1"),
    ("compress_ratios", [0, 0, 0, 2, 1, 1, 1, 0, 0], r"compress_ratios\[1\] 0; that layer is a KV source"),
    ("kv_source_layer_ids", [], "at least one layer"),
    ("kv_source_layer_ids", [1, 4, 3], "ascending"),
    ("kv_source_layer_ids", [1, 3, 3, 4], "ascending"),
    ("kv_source_layer_ids", [1, 3, 4, 7], "from 0 to 6"),
    ("index_source_layer_ids", [1, 4, 5], "3 is not"),
    ("index_source_layer_ids", [0, 1, 3, 4, 5], "no layer before the first KV source"),
    ("candidate_source_layer_id", 3, "the last KV source is layer 4"),
    ("candidate_source_layer_id", 5, "the last KV source is layer 4"),
    ("candidate_topk_blocks", 1, r"= 1 must be at least the index_topk of 5"),
]
PART_RULES = [
    ("engram_num_embeddings", [660], "one entry for each of the 2"),
    ("engram_num_embeddings", [660, 865], r"primes above engram_vocab_size 101 sum to \[660, 864\]"),
    ("engram_vocab_size", 104, "sum to"),
    ("engram_layer_ids", [3, 1], "ascending"),
    ("engram_layer_ids", [1, 7], "from 0 to 6"),
    ("engram_compressed_vocab_size", 321, "at most the vocab_size of 320"),
    ("engram_pad_token_id", 320, "ids below the vocab_size of 320"),
    ("dspark_target_layer_ids", [], "at least one"),
    ("dspark_target_layer_ids", [5, 7], "from 0 to 6"),
    ("dspark_noise_token_id", 320, "ids below the vocab_size"),
    ("dspark_num_experts_per_tok", 7, "at most the 6 routed experts"),
]


@pytest.mark.parametrize(("key", "value", "words"), WIDTH_RULES + SOURCE_RULES + PART_RULES)
def test_values_that_do_not_fit_together_are_refused(key: str, value: Any, words: str) -> None:
    document = tiny_document()
    document["text_config"][key] = value
    with pytest.raises(UserError, match=words) as caught:
        from_json(document, "that/config.json")
    assert caught.value.message.startswith("that/config.json: the configuration has")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
def test_token_ids_lie_in_the_vocabulary(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} 320; ids below the vocab_size of 320"):
        from_json(tiny_document() | {key: 320})


def test_the_image_tower_has_heads_of_four_quarters_and_a_token() -> None:
    document = tiny_document()
    document["vision_config"] |= {"hidden_size": 54}
    with pytest.raises(UserError, match=r"vision_config\.hidden_size 54; a multiple of 4 \* num_attention_heads = 12"):
        from_json(document)
    document = tiny_document()
    del document["image_token_id"]
    with pytest.raises(UserError, match="image_token_id is missing"):
        from_json(document)


def test_yarn_betas_are_ordered() -> None:
    document = tiny_document()
    document["text_config"]["rope_scaling"]["beta_fast"] = 1
    with pytest.raises(UserError, match=r"beta_fast 1; a number above beta_slow, 1,"):
        from_json(document)


def test_a_search_for_endless_primes_is_refused_before_it_starts() -> None:
    document = tiny_document()
    document["text_config"] |= {"engram_n_heads": 256, "engram_max_ngram_size": 16, "engram_layer_ids": list(range(7))}
    document["text_config"]["engram_num_embeddings"] = [1] * 7
    with pytest.raises(UserError, match="hash columns"):
        from_json(document)


def test_table_rows_are_the_released_ones() -> None:
    assert list(table_rows(16_000_000, 2, 4, 8)) == TEXT["engram_num_embeddings"]
    assert table_rows(200, 2, 4, 2) == (1362, 1552)


def test_one_source_and_no_candidates_are_enough() -> None:
    document = tiny_document()
    document["text_config"] |= {
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 0, 0],
        "kv_source_layer_ids": [2],
        "index_source_layer_ids": [2, 5],
        "candidate_source_layer_id": -1,
    }
    assert from_json(document).cut == 2
    document["text_config"]["candidate_source_layer_id"] = 2
    with pytest.raises(UserError, match="layer 2 with ratio 2"):
        from_json(document)
