"""A recipe that takes a hundredth of a second per step, with every part of a recipe in use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.models.deepseek_v41.architecture import Config, Yarn
from headrace.train.data.tasks.pairs import PairVocabulary
from headrace.train.loop import Trainer
from headrace.train.mixture import gather_material
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

SIZES = {"num_keys": 6, "num_values": 5, "num_noise": 7}
PAIRS = {"num_pairs": 4, "num_queries": 7, "min_distance": 5}


def small_model(vocab_size: int) -> Config:
    """Return three layers, one of each kind of source."""
    return Config(
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=3,
        num_heads=2,
        head_dim=32,
        rope_dim=8,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        window=4,
        norm_eps=1e-6,
        max_positions=128,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        yarn=Yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=32),
        compress_ratios=(2, 1, 1),
        kv_sources=(0, 1),
        index_sources=(0, 1, 2),
        index_heads=2,
        index_head_dim=32,
        index_topk=5,
        candidate_source=1,
        candidate_blocks=5,
        candidate_block_size=2,
        num_experts=3,
        experts_per_token=2,
        expert_dim=32,
        route_scale=1.5,
        swiglu_limit=10.0,
        num_streams=2,
        sinkhorn_iterations=5,
        hc_eps=1e-6,
        engram=None,
        draft=None,
        vision=None,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        image_token_id=None,
    )


def small_recipe(**changes: Any) -> Recipe:
    """Return nine steps in three phases on the pair probe alone; rows grow at step 6."""
    recipe = Recipe(
        name="small",
        model=small_model(PairVocabulary.alone(**SIZES).size),
        tasks=(TaskSettings(kind="pairs", options={**SIZES, **PAIRS}),),
        duration=9,
        learning_rate=LearningRate(
            warmup=Warmup(steps=2), parts=(Constant(value=5e-3, until=6), Cosine(first=5e-3, last=1e-3, until=9))
        ),
        sequence_length=Staircase(starts=(0, 6), values=(27, 33)),
        batch=BatchRamp(first=100, last=135, until=500),
        micro_batch=60,
        losses=LossSettings(index_rows=11),
        bias_speed=Staircase(starts=(0,), values=(1e-2,)),
        phases=(
            Phase(),
            Phase(start=3, attention="dense", trains="indexer"),
            Phase(start=5, has_candidates=True, replay="every-turn", quant=QuantPlan.everything()),
        ),
        evaluation=EvaluationSettings(every=4, text_rows=2, task_rows=2),
        saving=SaveSettings(every=4),
    )
    return replace(recipe, **changes)


def text_recipe(folder: Path, **changes: Any) -> Recipe:
    """Return the same with text of a folder beside the probe."""
    size = 400
    recipe = small_recipe(
        model=small_model(size),
        tokenizer=TokenizerSettings(size=size, num_reserved=41),
        text=TextSettings(
            sources=(SourceSettings(kind="folder", path=str(folder), licence="MIT"),), held_out_share=0.4, fim_rate=0.2
        ),
        tasks=(TaskSettings(kind="pairs", options={"num_keys": 6, "num_values": 5, **PAIRS}),),
    )
    return replace(recipe, **changes)


def write_texts(folder: Path, count: int = 9) -> Path:
    """Write short files into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        lines = [
            f"the wheel {index} turns {place} times as the water number {place * index} falls" for place in range(7)
        ]
        (folder / f"text{index}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def new_trainer(recipe: Recipe) -> Trainer:
    """Return a trainer before its first step."""
    return Trainer(recipe, gather_material(recipe))
