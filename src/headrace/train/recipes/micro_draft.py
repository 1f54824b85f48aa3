"""Drafts for the model of the recipe `micro`: two CPU-minutes, one core, on the text of the backbone's run.

`headrace train micro --out A`, then `headrace train micro-draft --backbone A --out B`.
"""

from headrace.train.draft_recipe import CalibrationSettings, ContinuationSettings, DraftRecipe, DraftSettings
from headrace.train.recipe import EvaluationSettings, SaveSettings
from headrace.train.schedule import Constant, Cosine, LearningRate, Staircase, Warmup

STEPS = 300
ROW_TOKENS = 128
PEAK = 1e-2


def micro_draft() -> DraftRecipe:
    """Return the recipe: two draft blocks, four tokens at once."""
    return DraftRecipe(
        name="micro-draft",
        draft=DraftSettings(num_layers=2, block_size=4, tap_layers=(0, 1, 2), markov_rank=32),
        tasks=(),
        duration=STEPS,
        learning_rate=LearningRate(
            warmup=Warmup(steps=STEPS // 25),
            parts=(
                Constant(value=PEAK, until=STEPS * 6 // 10),
                Cosine(first=PEAK, last=0.1 * PEAK, until=STEPS),
            ),
        ),
        row_tokens=ROW_TOKENS,
        batch_rows=8,
        micro_rows=8,
        anchors_per_row=32,
        continuations=ContinuationSettings(tokens=48),
        bias_speed=Staircase(starts=(0,), values=(5e-3,)),
        evaluation=EvaluationSettings(every=50, text_rows=8, task_rows=0),
        calibration=CalibrationSettings(text_rows=16, task_rows=0),
        saving=SaveSettings(every=0),
    )
