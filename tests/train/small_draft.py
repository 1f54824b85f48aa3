"""A backbone with n-gram memory that trains in a second, and a draft recipe for it with every part in use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.models.deepseek_v41.architecture import Engram
from headrace.models.deepseek_v41.config import table_rows
from headrace.train.draft_recipe import CalibrationSettings, ContinuationSettings, DraftRecipe, DraftSettings
from headrace.train.evaluate import Evaluation
from headrace.train.recipe import EvaluationSettings, Phase, Recipe, SaveSettings
from headrace.train.run import Outcome, train
from headrace.train.schedule import Constant, Cosine, LearningRate, Warmup
from tests.train.small_recipe import small_model, text_recipe, write_texts

_FIRST_PRIME_ABOVE = 60


class Silent:
    """Remembers what a run says."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.evaluations: list[Evaluation] = []
        self.proofs: list[tuple[str, str]] = []

    def on_start(self, _summary: object) -> None:
        """Hear nothing."""

    def on_step(self, record: Any, pace: Any) -> None:
        self.steps.append(record)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_proof(self, when: str, digest: str) -> None:
        self.proofs.append((when, digest))

    def on_saved(self, checkpoint: Path) -> None: ...


def backbone_recipe(texts: Path, **changes: Any) -> Recipe:
    """Return a few steps of a model with n-gram tables on text and pairs."""
    engram = Engram(
        layer_ids=(1,),
        num_embeddings=table_rows(_FIRST_PRIME_ABOVE, 1, 3, 2),
        max_ngram=3,
        first_prime_above=_FIRST_PRIME_ABOVE,
        num_hashes=2,
        head_dim=32,
        pad_token_id=2,
        compressed_vocab_size=400,
    )
    model = replace(small_model(400), engram=engram, eos_token_id=1, pad_token_id=2)
    recipe = text_recipe(texts, model=model, duration=30, phases=(Phase(),))
    recipe = replace(recipe, evaluation=EvaluationSettings(every=0, text_rows=2, task_rows=2))
    return replace(recipe, saving=SaveSettings(every=0), **changes)


def train_backbone(folder: Path) -> Path:
    """Train it and return the folder of the run."""
    train(backbone_recipe(write_texts(folder / "texts")), folder / "backbone", Silent())
    return folder / "backbone"


def draft_recipe(**changes: Any) -> DraftRecipe:
    """Return two blocks that draft three tokens; some documents are regenerated."""
    recipe = DraftRecipe(
        name="small-draft",
        draft=DraftSettings(num_layers=2, block_size=3, tap_layers=(0, 2), markov_rank=7, num_experts=5),
        duration=12,
        learning_rate=LearningRate(
            warmup=Warmup(steps=2), parts=(Constant(value=1e-2, until=8), Cosine(first=1e-2, last=1e-3, until=12))
        ),
        row_tokens=44,
        batch_rows=5,
        micro_rows=2,
        anchors_per_row=9,
        continuations=ContinuationSettings(tokens=11, regenerated_share=0.3, temperature=0.8),
        evaluation=EvaluationSettings(every=4, text_rows=3, task_rows=1),
        calibration=CalibrationSettings(text_rows=3, task_rows=1),
        saving=SaveSettings(every=5),
    )
    return replace(recipe, **changes)


def draft(
    out: Path, backbone: Path | None, recipe: DraftRecipe | None = None, **options: Any
) -> tuple[Outcome, Silent]:
    """Run a draft recipe in a folder."""
    heard = Silent()
    return train(recipe or draft_recipe(), out, heard, backbone=backbone, **options), heard
