"""The smallest recipe that shows the whole machine at work: four CPU-minutes, one core, text and the pair probe.

It reads Python's own library and rows of fused pairs whose answers lie beyond what the windows of all layers together
can carry, so only global entries that the index picks can solve them. `micro_window_only` is the control that must
fail: the same run in which global entries hold nothing.
"""

from dataclasses import replace

from headrace.models.deepseek_v41.architecture import Config, Yarn
from headrace.train.quantise import QuantPlan
from headrace.train.recipe import (
    EvaluationSettings,
    LossSettings,
    Phase,
    Recipe,
    SaveSettings,
    SourceSettings,
    TaskSettings,
    TextSettings,
    TokenizerSettings,
)
from headrace.train.schedule import BatchRamp, Constant, Cosine, LearningRate, Staircase, Warmup

STEPS = 800
LAST_PHASE = 620
ROW_TOKENS = 128
VOCAB_SIZE = 1024
NUM_RESERVED = 288  # 16 x 16 pairs, 16 queries, 16 values
PEAK = 1e-2
_PAIRS = {"num_keys": 16, "num_values": 16, "num_queries": 24, "min_distance": 24}


def micro_model() -> Config:
    """Return 3 layers of every role: a ratio-2 KV source, the cut with the candidate source, a reindex layer."""
    return Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_layers=3,
        num_heads=2,
        head_dim=64,
        rope_dim=8,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        window=8,
        norm_eps=1e-6,
        max_positions=1024,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        yarn=Yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=256),
        compress_ratios=(2, 1, 1),
        kv_sources=(0, 1),
        index_sources=(0, 1, 2),
        index_heads=2,
        index_head_dim=32,
        index_topk=48,
        candidate_source=1,
        candidate_blocks=24,
        candidate_block_size=4,
        num_experts=4,
        experts_per_token=2,
        expert_dim=32,
        route_scale=1.5,
        swiglu_limit=10.0,
        num_streams=2,
        sinkhorn_iterations=20,
        hc_eps=1e-6,
        engram=None,
        draft=None,
        vision=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=None,
    )


def micro() -> Recipe:
    """Return the recipe: sparse from the first step; candidates, replay and every quantiser in the last phase."""
    return Recipe(
        name="micro",
        model=micro_model(),
        tokenizer=TokenizerSettings(size=VOCAB_SIZE, num_reserved=NUM_RESERVED, max_bytes=2**21),
        text=TextSettings(sources=(SourceSettings(kind="stdlib"),), weight=0.2, max_bytes=3 * 2**20),
        tasks=(
            TaskSettings(kind="pairs", weight=0.5, options={**_PAIRS, "num_pairs": 12}),
            # few pairs are found soon, and what finds them finds many
            TaskSettings(kind="pairs", weight=0.3, options={**_PAIRS, "num_pairs": 3, "name": "few-pairs"}),
        ),
        duration=STEPS,
        learning_rate=LearningRate(
            warmup=Warmup(steps=20),
            parts=(
                Constant(value=PEAK, until=STEPS * 6 // 10),
                Cosine(first=PEAK, last=0.1 * PEAK, until=STEPS * 95 // 100),
                Constant(value=0.1 * PEAK, until=STEPS),
            ),
        ),
        sequence_length=Staircase(starts=(0, 260), values=(ROW_TOKENS // 2, ROW_TOKENS)),
        batch=BatchRamp(first=16 * ROW_TOKENS, last=16 * ROW_TOKENS, until=0),
        micro_batch=16 * ROW_TOKENS,
        group_changes={"embedding": {"rate": 4.0}, "head": {"rate": 4.0}},
        losses=LossSettings(index_rows=256),
        bias_speed=Staircase(starts=(0, STEPS // 10), values=(1e-2, 1e-3)),
        phases=(
            Phase(),
            Phase(start=LAST_PHASE, has_candidates=True, replay="every-turn", quant=QuantPlan.everything()),
        ),
        embedding_deviation=0.1,
        evaluation=EvaluationSettings(every=80, text_rows=32, task_rows=16),
        saving=SaveSettings(every=320),
    )


def micro_window_only() -> Recipe:
    """Return the control: global entries are 0 and stay so, and no index is taught."""
    recipe = micro()
    return replace(
        recipe,
        name="micro-window-only",
        held_at_zero=("layers.*.attn.compressor.norm.weight",),
        losses=replace(recipe.losses, index=0.0),
    )
