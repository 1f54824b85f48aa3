"""Drafts for headrace-nano: two blocks that draft five tokens, on the text of the backbone's run.

The release has three blocks over a backbone of 40 layers; over one of six, a third block would cost a draft half as
much again, and the published measurements find the large step between one and two (training.md section 7.3).

`scripts/make_nano.sh` carries it out: `headrace train nano-draft --backbone A --out B`.
"""

from headrace.train.draft_recipe import CalibrationSettings, ContinuationSettings, DraftRecipe, DraftSettings
from headrace.train.recipe import EvaluationSettings, SaveSettings
from headrace.train.schedule import Constant, Cosine, LearningRate, Staircase, Warmup

CORPUS_STEPS = 1150  # on text as it was written
STEPS = CORPUS_STEPS + 120  # the others on what the backbone itself writes greedily: that is what drafts are judged on
ROW_TOKENS = 512
PEAK = 5e-3


def nano_draft() -> DraftRecipe:
    """Return the recipe."""
    return DraftRecipe(
        name="nano-draft",
        draft=DraftSettings(num_layers=2, block_size=5, tap_layers=(3, 4, 5), markov_rank=64, num_experts=8),
        tasks=(),
        duration=STEPS,
        learning_rate=LearningRate(
            warmup=Warmup(steps=CORPUS_STEPS // 25),
            parts=(
                Constant(value=PEAK, until=CORPUS_STEPS * 6 // 10),
                Cosine(first=PEAK, last=0.1 * PEAK, until=CORPUS_STEPS),
                Cosine(first=0.4 * PEAK, last=0.05 * PEAK, until=STEPS),
            ),
        ),
        row_tokens=ROW_TOKENS,
        batch_rows=3,  # few rows with many anchors: the backbone's pass is half of a step
        micro_rows=3,
        anchors_per_row=128,
        continuations=ContinuationSettings(
            tokens=96, regenerated_share=1.0, regenerated_from=CORPUS_STEPS, temperature=0.0
        ),
        bias_speed=Staircase(starts=(0,), values=(5e-3,)),
        evaluation=EvaluationSettings(every=300, text_rows=8, task_rows=0),
        calibration=CalibrationSettings(text_rows=24, task_rows=0),
        saving=SaveSettings(every=20),
    )
