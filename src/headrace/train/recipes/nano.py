"""headrace-nano, the model that ships: every text mechanism of V4.1 at the size of a laptop, hours on one core.

It reads Python and technical documentation under permissive licences, and, in a third of its rows, questions that only
global entries can answer: fused pairs, and their natural forms in the chat format. The distance of the pairs grows:
among 200 entries a model of this size does not find one to attend to, among 64 it does within 130 steps, so the first
steps see short pair rows alone, through a window of 8 that leaves the answers to global entries. Rows grow from 512 to
4,096 tokens. In the last eighth it is run as it is served: candidate pool, replay, every quantiser.
`scripts/make_nano.sh` fetches the text and carries everything out.
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
    SourceSettings,
    TaskSettings,
    TextSettings,
    TokenizerSettings,
)
from headrace.train.schedule import BatchRamp, Constant, Cosine, LearningRate, Staircase, Warmup

STEPS = 850
BATCH_TOKENS = 8192
FIRST_PEAK, PEAK = 7e-3, 4e-3
VOCAB_SIZE = 4608
NUM_RESERVED = 320  # 288 for the pair probe: 16 x 16 pairs, 16 queries, 16 values
WINDOW = 128
DOCS_FOLDER = "nano-docs"  # where `scripts/nano_docs.py` writes, relative to the folder the run starts in
HELD_OUT = ("attrs", "click", "flask", "jinja2", "requests", "starlette", "urllib3", "werkzeug")
PACKAGES = (
    "aiohttp", "black", "celery", "dask", "django", "fastapi", "networkx", "pydantic", "pytest", "scrapy", "sphinx",
    "sqlalchemy", "tornado", "twisted",
)  # fmt: skip
_FIRST_PRIME_ABOVE = 16_000
_FIND = 180  # steps of short pair rows alone
_PAIRS = {"num_keys": 16, "num_values": 16}
_NEAR = {**_PAIRS, "num_tokens": 64, "num_queries": 24, "min_distance": 10}
_MIDDLE = {**_PAIRS, "num_tokens": 256, "num_queries": 64, "min_distance": WINDOW + 1}
_FAR = {**_PAIRS, "num_queries": 160, "min_distance": WINDOW + 1}


def nano_model() -> Config:
    """Return 6 layers: an encoder with two sources of two tokens per entry and a reuse of one, a decoder of three."""
    return Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        num_layers=6,
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=96,
        o_lora_rank=64,
        o_groups=2,
        window=WINDOW,
        norm_eps=1e-6,
        max_positions=16_384,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        yarn=Yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=4096),
        compress_ratios=(2, 2, 2, 1, 1, 1),
        kv_sources=(0, 1, 3),
        index_sources=(0, 1, 3, 4),
        index_heads=4,
        index_head_dim=32,
        index_topk=64,
        candidate_source=3,
        candidate_blocks=64,
        candidate_block_size=8,
        num_experts=16,
        experts_per_token=2,
        expert_dim=128,
        route_scale=1.5,
        swiglu_limit=10.0,
        num_streams=4,
        sinkhorn_iterations=20,
        hc_eps=1e-6,
        engram=Engram(
            layer_ids=(1, 2),
            num_embeddings=table_rows(_FIRST_PRIME_ABOVE, 2, 3, 2),
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


def _text() -> TextSettings:
    return TextSettings(
        sources=(
            SourceSettings(kind="stdlib"),
            SourceSettings(kind="packages", names=PACKAGES + HELD_OUT),
            SourceSettings(kind="folder", path=DOCS_FOLDER, licence="BSD-3-Clause AND BSD-2-Clause AND MIT"),
        ),
        weight=0.68,
        max_bytes=32 * 2**20,
        held_out_share=0.0,
        held_out_groups=tuple(f"package:{name}" for name in HELD_OUT),
        max_characters=2**15,
    )


def _tasks() -> tuple[TaskSettings, ...]:
    """Return the rows that only global entries can answer, and the short ones that begin; few pairs are found first."""
    questions = {"config_value": 4, "log_error": 1, "definition": 4, "tool_result": 1}
    return (
        TaskSettings(kind="pairs", weight=0.02, options={**_NEAR, "num_pairs": 16, "name": "near-pairs"}),
        TaskSettings(kind="pairs", weight=0.0, options={**_NEAR, "num_pairs": 3, "name": "few-pairs"}),
        TaskSettings(
            kind="pairs", weight=0.08, label_weight=3.0, options={**_MIDDLE, "num_pairs": 16, "name": "middle-pairs"}
        ),
        TaskSettings(kind="pairs", weight=0.1, label_weight=3.0, options={**_FAR, "num_pairs": 16}),
        *(
            TaskSettings(
                kind="retrieval",
                weight=0.03,
                label_weight=4.0,
                options={"puzzle": puzzle, "num_questions": count, "min_distance": WINDOW + 1},
            )
            for puzzle, count in questions.items()
        ),
    )


def _only(shares: dict[str, float]) -> dict[str, float]:
    """Return shares in which every kind that is not named has none."""
    names = ["text", *(str(task.options.get("name", task.options.get("puzzle", task.kind))) for task in _tasks())]
    return {**dict.fromkeys(names, 0.0), **shares}


def nano() -> Recipe:
    """Return the recipe."""
    return Recipe(
        name="nano",
        model=nano_model(),
        tokenizer=TokenizerSettings(size=VOCAB_SIZE, num_reserved=NUM_RESERVED),
        text=_text(),
        tasks=_tasks(),
        duration=STEPS,
        learning_rate=LearningRate(
            warmup=Warmup(steps=20),
            parts=(
                Constant(value=FIRST_PEAK, until=_FIND),
                Constant(value=PEAK, until=STEPS * 55 // 100),
                Cosine(first=PEAK, last=0.08 * PEAK, until=STEPS * 97 // 100),
                Constant(value=0.08 * PEAK, until=STEPS),
            ),
        ),
        sequence_length=Staircase(
            starts=(0, STEPS * 40 // 100, STEPS * 65 // 100, STEPS * 85 // 100), values=(512, 1024, 2048, 4096)
        ),
        batch=BatchRamp(first=BATCH_TOKENS // 2, last=BATCH_TOKENS, until=2**20),
        micro_batch=BATCH_TOKENS // 2,
        optimizer=OptimizerSettings(sinkhorn=SinkhornSettings(touched_window=16)),
        group_changes={"embedding": {"rate": 4.0}},
        losses=LossSettings(index_rows=256),
        bias_speed=Staircase(starts=(0, 96), values=(5e-3, 1e-3)),
        phases=(
            Phase(window=8, shares=_only({"near-pairs": 0.7, "few-pairs": 0.3})),
            Phase(start=_FIND),
            Phase(start=STEPS * 88 // 100, has_candidates=True, replay="every-turn", quant=QuantPlan.everything()),
        ),
        embedding_deviation=0.1,
        evaluation=EvaluationSettings(every=150, text_rows=8, task_rows=2),
        saving=SaveSettings(every=25),
    )
