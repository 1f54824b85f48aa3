"""A small V4.1 with every mechanism: n-gram memory, pool, replay, quantisers, growing rows; hours on one core.

Sizes and schedule follow training.md section 3, "small-scale translation": warm-up, flat to 65 %, cosine to a tenth,
flat tail; rows of 256, 512 and 1,024 tokens, where 512 is the first length that sees more entries than it picks.
"""

from headrace.models.deepseek_v41.architecture import Config, Engram, Yarn
from headrace.models.deepseek_v41.config import table_rows
from headrace.train.optim.optimizer import OptimizerSettings
from headrace.train.optim.sinkhorn import SinkhornSettings
from headrace.train.quantise import QuantPlan
from headrace.train.recipe import (
    EvaluationSettings,
    LossSettings,
    Phase,
    Recipe,
    SaveSettings,
    TaskSettings,
    TextSettings,
    TokenizerSettings,
)
from headrace.train.schedule import BatchRamp, Constant, Cosine, LearningRate, Staircase, Warmup

STEPS = 3000
VOCAB_SIZE = 4096
BATCH_TOKENS = 8192
PEAK = 4e-3
_FIRST_PRIME_ABOVE = 1500


def tiny_model() -> Config:
    """Return 6 layers: three of an encoder with pairs of tokens per entry, three of a decoder."""
    return Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_layers=6,
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        window=32,
        norm_eps=1e-6,
        max_positions=4096,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        yarn=Yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=1024),
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_sources=(1, 3),
        index_sources=(1, 3, 5),
        index_heads=4,
        index_head_dim=32,
        index_topk=128,
        candidate_source=3,
        candidate_blocks=24,
        candidate_block_size=8,
        num_experts=8,
        experts_per_token=2,
        expert_dim=96,
        route_scale=1.5,
        swiglu_limit=10.0,
        num_streams=4,
        sinkhorn_iterations=20,
        hc_eps=1e-6,
        engram=Engram(
            layer_ids=(1,),
            num_embeddings=table_rows(_FIRST_PRIME_ABOVE, 1, 3, 2),
            max_ngram=3,
            first_prime_above=_FIRST_PRIME_ABOVE,
            num_hashes=2,
            head_dim=32,
            pad_token_id=2,
            compressed_vocab_size=VOCAB_SIZE,
        ),
        draft=None,
        vision=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=None,
    )


def tiny_v41() -> Recipe:
    """Return the recipe."""
    return Recipe(
        name="tiny-v41",
        model=tiny_model(),
        tokenizer=TokenizerSettings(size=VOCAB_SIZE, num_reserved=288),
        text=TextSettings(weight=0.7, fim_rate=0.1, max_characters=2**15),
        tasks=(
            TaskSettings(
                kind="pairs",
                weight=0.15,
                options={"num_keys": 16, "num_values": 16, "num_pairs": 16, "num_queries": 48, "min_distance": 64},
            ),
            TaskSettings(kind="retrieval", weight=0.05, options={"puzzle": "config_value"}),
            TaskSettings(kind="copy", weight=0.05),
            TaskSettings(kind="addition", weight=0.05),
        ),
        duration=STEPS,
        learning_rate=LearningRate(
            warmup=Warmup(steps=150),
            parts=(
                Constant(value=PEAK, until=STEPS * 65 // 100),
                Cosine(first=PEAK, last=0.1 * PEAK, until=STEPS * 95 // 100),
                Constant(value=0.1 * PEAK, until=STEPS),
            ),
        ),
        sequence_length=Staircase(starts=(0, STEPS // 4, STEPS // 2), values=(256, 512, 1024)),
        batch=BatchRamp(first=BATCH_TOKENS, last=BATCH_TOKENS, until=0),
        micro_batch=BATCH_TOKENS,
        optimizer=OptimizerSettings(sinkhorn=SinkhornSettings(touched_window=16)),
        group_changes={"embedding": {"rate": 4.0}, "head": {"rate": 4.0}},
        losses=LossSettings(index_rows=256),
        bias_speed=Staircase(starts=(0, STEPS // 10), values=(5e-3, 1e-3)),
        phases=(
            Phase(),
            Phase(start=STEPS * 85 // 100, has_candidates=True, replay="every-turn", quant=QuantPlan.everything()),
        ),
        embedding_deviation=0.1,
        evaluation=EvaluationSettings(every=250, text_rows=24, task_rows=8),
        saving=SaveSettings(every=250),
    )
