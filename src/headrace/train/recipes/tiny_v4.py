"""V4's rules and stages at small scale, on the layers of V4.1: headrace has no layer graph of V4 yet.

Of V4 are the update rules (AdamW for embedding and head, whole matrices to Muon for the query projections), the stages
(dense attention, then a short stage that trains the indexer alone, then sparse attention) and the answer to spikes
(detector, rollback, anticipatory routing). Of V4.1 are the layers: entries of two tokens or one, the decoder's shared
entries, streams and router. V4's compression of 4 and 128 tokens, its first layers with hashed routing and its
next-token module, with the loss that goes with it, are not here; neither are V4.1's n-gram memory and candidate pool.

Sizes and schedule are those of `tiny_v41.py`. No report says how long the stages are beyond "a trillion tokens" and
"short", at which rate the indexer is warmed up, or anything about the detector: these numbers are chosen here.
"""

from dataclasses import replace

from headrace.models.deepseek_v41.architecture import Config
from headrace.train.optim.optimizer import OptimizerSettings
from headrace.train.recipe import LossSettings, Phase, Recipe, StabilitySettings
from headrace.train.recipes.tiny_v41 import STEPS, tiny_model, tiny_v41
from headrace.train.schedule import Staircase

WARM_UP_START = STEPS * 30 // 100
SPARSE_START = STEPS * 35 // 100


def tiny_v4_model() -> Config:
    """Return the layers of tiny-v41 without n-gram memory and candidate pool."""
    return replace(tiny_model(), engram=None, candidate_source=None)


def tiny_v4() -> Recipe:
    """Return the recipe: the indexer is warmed up when rows first see more entries than it picks."""
    return replace(
        tiny_v41(),
        name="tiny-v4",
        family="v4",
        model=tiny_v4_model(),
        sequence_length=Staircase(starts=(0, WARM_UP_START, STEPS // 2), values=(256, 512, 1024)),
        optimizer=OptimizerSettings(),
        group_changes={},
        losses=LossSettings(index_rows=256, index_pool="picked"),
        phases=(
            Phase(attention="dense", trains="backbone"),
            Phase(start=WARM_UP_START, attention="dense", trains="indexer"),
            Phase(start=SPARSE_START),
        ),
        stability=StabilitySettings(),
    )
