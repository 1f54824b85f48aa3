"""Which values of a configuration fit together.

`check(config)` raises one sentence at the first rule that is broken; `config.py` calls it on everything it reads, and
factories of tests call it on what they make up. Source: spec sections 3.3, 3.6 and 6.1; primes: 3.9.2.
"""

from collections.abc import Sequence
from itertools import pairwise

from headrace.core.errors import UserError
from headrace.memory.addressing import hash_primes
from headrace.models.deepseek_v41.architecture import Config, Draft, Engram, Vision

_MAX_PRIMES = 2**14  # bounds the search; the release takes 48


def table_rows(first_prime_above: int, num_layers: int, max_ngram: int, num_hashes: int) -> tuple[int, ...]:
    """Return the rows of each Engram table: the sums of the primes its hash columns take."""
    primes = hash_primes(num_layers, max_ngram, num_hashes, first_prime_above)
    return tuple(int(rows) for rows in primes.sum(axis=(1, 2)))


def _refuse(name: str, value: object, rule: str) -> UserError:
    return UserError(f"the configuration has {name} {value}; {rule}.", param=name)


def _multiple(name: str, value: int, step: int, why: str) -> None:
    if value % step:
        raise _refuse(name, value, f"a multiple of {step} is accepted, since {why}")


def _ascending(name: str, values: Sequence[int], end: int, what: str) -> None:
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise _refuse(name, list(values), "ids in ascending order, each once, are accepted")
    for value in values:
        if not 0 <= value < end:
            raise _refuse(name, list(values), f"{what} from 0 to {end - 1} are accepted, and {value} is not one")


def _token(name: str, value: int, config: Config) -> None:
    if not 0 <= value < config.vocab_size:
        raise _refuse(name, value, f"ids below the vocab_size of {config.vocab_size} are accepted")


def check(config: Config) -> None:
    """Refuse a configuration whose values do not fit together.

    Raises:
        UserError: a rule is broken; the sentence names the field, the value and the rule.
    """
    _check_widths(config)
    _check_ratios(config)
    _check_sources(config)
    _check_shared_ratios(config)
    _check_candidates(config)
    if config.engram:
        _check_engram(config, config.engram)
    if config.draft:
        _check_draft(config, config.draft)
    if config.vision:
        _check_vision(config, config.vision)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _token(name, getattr(config, name), config)
    if config.image_token_id is not None:
        _token("image_token_id", config.image_token_id, config)


def _check_widths(config: Config) -> None:
    block = config.block
    scales = f"one scale covers {block} columns"
    _multiple("hidden_size", config.hidden_size, block, scales)
    _multiple("q_lora_rank", config.q_lora_rank, block, scales)
    _multiple("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, block, scales)
    _multiple("moe_intermediate_size", config.expert_dim, block, scales)
    _multiple("head_dim", config.head_dim, block, "cache entries are stored in groups of that size")
    _multiple("index_head_dim", config.index_head_dim, block, "index keys are stored in groups of that size")
    if config.window > config.max_positions:
        rule = f"at most the max_position_embeddings of {config.max_positions} is accepted"
        raise _refuse("sliding_window", config.window, rule)
    _multiple("num_attention_heads", config.num_heads, config.o_groups, f"o_groups is {config.o_groups}")
    limit = min(config.head_dim, config.index_head_dim)
    if config.rope_dim % 2 or config.rope_dim > limit:
        rule = f"an even number up to {limit} (the smaller of head_dim and index_head_dim) is accepted"
        raise _refuse("qk_rope_head_dim", config.rope_dim, rule)
    if config.experts_per_token > config.num_experts:
        rule = f"at most the {config.num_experts} routed experts are accepted"
        raise _refuse("num_experts_per_tok", config.experts_per_token, rule)
    if config.yarn.beta_fast <= config.yarn.beta_slow:
        rule = f"a number above beta_slow, {config.yarn.beta_slow:g}, is accepted"
        raise _refuse("rope_scaling.beta_fast", f"{config.yarn.beta_fast:g}", rule)


def _check_ratios(config: Config) -> None:
    total = config.num_layers + config.num_draft_layers
    ratios = config.compress_ratios
    if len(ratios) != total:
        rule = f"{total} are expected, one per layer ({config.num_layers} backbone and {config.num_draft_layers} draft)"
        raise UserError(f"the configuration has {len(ratios)} compress_ratios; {rule}.", param="compress_ratios")
    for layer_id, ratio in enumerate(ratios):
        if ratio not in {0, 1, 2}:
            raise _refuse(f"compress_ratios[{layer_id}]", ratio, "0, 1 and 2 are accepted")
        if ratio and layer_id >= config.num_layers:
            raise _refuse(f"compress_ratios[{layer_id}]", ratio, "a draft layer has only its window, ratio 0")


def _check_sources(config: Config) -> None:
    if not config.kv_sources:
        raise _refuse("kv_source_layer_ids", "[]", "at least one layer must write global KV")
    _ascending("kv_source_layer_ids", config.kv_sources, config.num_layers, "backbone layers")
    _ascending("index_source_layer_ids", config.index_sources, config.num_layers, "backbone layers")
    if missing := set(config.kv_sources) - set(config.index_sources):
        rule = f"every KV source must be an index source too, and {min(missing)} is not"
        raise _refuse("index_source_layer_ids", list(config.index_sources), rule)
    if config.index_sources[0] != config.kv_sources[0]:
        rule = f"no layer before the first KV source, {config.kv_sources[0]}, has anything to select from"
        raise _refuse("index_source_layer_ids", list(config.index_sources), rule)


def _check_shared_ratios(config: Config) -> None:
    ratios = config.compress_ratios
    for layer_id in range(config.kv_sources[0]):
        if ratios[layer_id]:
            rule = f"the first KV source is layer {config.kv_sources[0]}, so layers before it have only their window"
            raise _refuse(f"compress_ratios[{layer_id}]", ratios[layer_id], rule)
    bounds = (*config.kv_sources, config.num_layers)
    for source, end in pairwise(bounds):
        if ratios[source] == 0:
            raise _refuse(f"compress_ratios[{source}]", 0, "that layer is a KV source, so 1 or 2 is accepted")
        for layer_id in range(source + 1, end):
            if ratios[layer_id] != ratios[source]:
                rule = f"layers {source} to {end - 1} share the KV of layer {source}, whose ratio is {ratios[source]}"
                raise _refuse(f"compress_ratios[{layer_id}]", ratios[layer_id], rule)


def _check_candidates(config: Config) -> None:
    source = config.candidate_source
    if source is None:
        return
    if source != config.cut or config.compress_ratios[source] != 1:
        last = f"{config.cut} with ratio {config.compress_ratios[config.cut]}"
        rule = f"the last KV source, of ratio 1, or -1 for none is accepted; the last KV source is layer {last}"
        raise _refuse("candidate_source_layer_id", source, rule)
    reach = (config.candidate_blocks - 1) * config.candidate_block_size + 1
    if reach < config.index_topk:
        rule = (
            f"(candidate_topk_blocks - 1) * candidate_block_size + 1 = {reach} must be at least the index_topk of "
            f"{config.index_topk}"
        )
        raise _refuse("candidate_topk_blocks", config.candidate_blocks, rule)


def _check_engram(config: Config, engram: Engram) -> None:
    _ascending("engram_layer_ids", engram.layer_ids, config.num_layers, "backbone layers")
    _multiple("engram_head_dim", engram.head_dim, config.block, f"one scale covers {config.block} columns of a row")
    _token("engram_pad_token_id", engram.pad_token_id, config)
    if engram.compressed_vocab_size > config.vocab_size:
        rule = f"at most the vocab_size of {config.vocab_size} is accepted"
        raise _refuse("engram_compressed_vocab_size", engram.compressed_vocab_size, rule)
    if len(engram.num_embeddings) != len(engram.layer_ids):
        rule = f"one entry for each of the {len(engram.layer_ids)} engram_layer_ids is expected"
        raise _refuse("engram_num_embeddings", list(engram.num_embeddings), rule)
    if engram.num_columns * len(engram.layer_ids) > _MAX_PRIMES:
        rule = f"at most {_MAX_PRIMES} hash columns over all layers are accepted"
        raise _refuse("engram_n_heads", engram.num_hashes, rule)
    expected = table_rows(engram.first_prime_above, len(engram.layer_ids), engram.max_ngram, engram.num_hashes)
    if engram.num_embeddings != expected:
        rule = f"the primes above engram_vocab_size {engram.first_prime_above} sum to {list(expected)}"
        raise _refuse("engram_num_embeddings", list(engram.num_embeddings), rule)


def _check_draft(config: Config, draft: Draft) -> None:
    _ascending("dspark_target_layer_ids", draft.tap_layers, config.num_layers, "backbone layers")
    if not draft.tap_layers:
        raise _refuse("dspark_target_layer_ids", "[]", "at least one backbone layer must be tapped")
    _token("dspark_noise_token_id", draft.noise_token_id, config)
    if draft.experts_per_token > draft.num_experts:
        rule = f"at most the {draft.num_experts} routed experts of a draft layer are accepted"
        raise _refuse("dspark_num_experts_per_tok", draft.experts_per_token, rule)


def _check_vision(config: Config, vision: Vision) -> None:
    if config.image_token_id is None:
        raise UserError("the configuration has a vision tower but no image_token_id.", param="image_token_id")
    if vision.hidden_size % (4 * vision.num_heads):
        rule = (
            f"a multiple of 4 * num_attention_heads = {4 * vision.num_heads} is accepted, since every head turns "
            "quarters of its width by row and column"
        )
        raise _refuse("vision_config.hidden_size", vision.hidden_size, rule)
