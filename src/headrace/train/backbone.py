"""The frozen backbone of a draft run: where it comes from, what it is, and the proof that it stays so.

Read `draft_recipe.py` before and `draft_loop.py` after.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.checkpoint.catalog import Catalog, open_catalog
from headrace.checkpoint.stream import pieces
from headrace.core.errors import UserError
from headrace.core.strict_json import read_json
from headrace.models.deepseek_v41.architecture import Config, Draft
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.config_rules import check
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.text.tokenizer import FILE_NAME, Tokenizer
from headrace.train.draft_recipe import DraftRecipe, DraftSettings
from headrace.train.graph import DTYPES
from headrace.train.masters import Masters
from headrace.train.recipe import EvaluationSettings, Recipe, TokenizerSettings
from headrace.train.recipe_json import from_json
from headrace.train.save import RECIPE_NAME, check_exported, checkpoints_in
from headrace.train.schedule import BatchRamp, Staircase
from headrace.train.stored import read_masters

DRAFT_NAME = "draft.json"
_MAX_BYTES = 16 * 2**20
_TAPS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """A backbone in the official format.

    Attributes:
        folder: the checkpoint.
        catalog: where its tensors lie.
        stored: its configuration, with a draft and a vision tower if it has them.
        config: the same with neither.
        masters: what its text layers compute with.
        model: the cached path over the same.
        tokenizer: text of its `tokenizer.json`; None without one.
        recipe: of the run that made it; None where nobody wrote it down.
    """

    folder: Path
    catalog: Catalog
    stored: Config
    config: Config
    masters: Masters
    model: DeepseekV41
    tokenizer: str | None
    recipe: Recipe | None

    @property
    def num_ids(self) -> int:
        """Token ids that have a token."""
        return self.config.vocab_size if self.tokenizer is None else Tokenizer.from_text(self.tokenizer).size


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path stands for: a checkpoint folder, or the newest one of a run folder.

    Raises:
        UserError: it is neither.
    """
    path = path.resolve()
    if (path / "config.json").is_file():
        return path
    found = checkpoints_in(path) if path.is_dir() else []
    if not found:
        raise UserError(
            f"--backbone {path} holds no checkpoint; a folder with a config.json, or the folder of a run of `headrace "
            "train` with a step in it, is accepted.",
            param="backbone",
        )
    return found[-1]


def load_backbone(path: Path, numerics: str) -> Backbone:
    """Load a backbone. A draft module that it has is left out: it is trained anew.

    Args:
        path: see `find_checkpoint`.
        numerics: "float32" or "bfloat16".

    Raises:
        UserError: there is no checkpoint, it is damaged, or its tokenizer is another model's.
    """
    folder = find_checkpoint(path)
    check_exported(folder)
    stored = load_config(folder)
    config = replace(stored, draft=None, vision=None, compress_ratios=stored.compress_ratios[: stored.num_layers])
    loaded = load_model(folder, LoadOptions(numerics=Numerics(dtype=DTYPES[numerics])))
    if loaded.tokenizer is not None and loaded.tokenizer.size > config.vocab_size:
        raise UserError(
            f"{folder / FILE_NAME} has {loaded.tokenizer.size} ids and the backbone {config.vocab_size}; the "
            "backbone's own tokenizer is accepted.",
            param="tokenizer",
        )
    return Backbone(
        folder=folder,
        catalog=open_catalog(folder),
        stored=stored,
        config=config,
        masters=read_masters(folder, stored, config),
        model=loaded.model,
        tokenizer=None if loaded.tokenizer is None else (folder / FILE_NAME).read_text(encoding="utf-8"),
        recipe=_recipe_of(folder),
    )


def _recipe_of(folder: Path) -> Recipe | None:
    """Return the recipe beside a checkpoint: what its run, or the run of its backbone, was made by."""
    if (folder / DRAFT_NAME).is_file():
        found = from_json(read_json(folder / DRAFT_NAME, max_bytes=_MAX_BYTES)["data"], str(folder / DRAFT_NAME))
        return found if isinstance(found, Recipe) else None
    path = folder.parent / RECIPE_NAME
    if folder not in checkpoints_in(folder.parent) or not path.is_file():
        return None
    found = from_json(read_json(path, max_bytes=_MAX_BYTES), str(path))
    return found if isinstance(found, Recipe) else None


def with_draft(config: Config, settings: DraftSettings) -> Config:
    """Return a configuration with a draft module.

    Raises:
        UserError: a tapped layer, a token id or a number of experts does not fit the backbone.
    """
    count = config.num_layers
    taps = settings.tap_layers
    found = replace(
        config,
        draft=Draft(
            num_layers=settings.num_layers,
            block_size=settings.block_size,
            noise_token_id=config.pad_token_id if settings.noise_token_id is None else settings.noise_token_id,
            tap_layers=tuple(range(max(0, count - _TAPS), count)) if taps is None else taps,
            markov_rank=settings.markov_rank,
            num_experts=settings.num_experts or config.num_experts,
            experts_per_token=settings.experts_per_token or config.experts_per_token,
        ),
        compress_ratios=(*config.compress_ratios[:count], *[0] * settings.num_layers),
    )
    check(found)
    return found


def data_recipe(recipe: DraftRecipe, backbone: Backbone) -> Recipe:
    """Return what the run reads as a recipe of its own: the backbone's text and tasks in the draft's rows.

    Raises:
        UserError: neither recipe names text or tasks, or rows are longer than the backbone's context.
    """
    base = backbone.recipe
    text = recipe.text if recipe.text is not None or base is None else base.text
    tasks = recipe.tasks if recipe.tasks is not None else () if base is None else base.tasks
    if text is None and not tasks:
        raise UserError(
            f"recipe {recipe.name!r} has neither text nor tasks, and no recipe lies beside {backbone.folder}; a recipe "
            "with text or tasks, or the folder of the backbone's run, is accepted.",
            param="text",
        )
    if text is not None and backbone.tokenizer is None:
        raise UserError(f"{backbone.folder} has no {FILE_NAME}; the tokenizer it was trained with is needed.", "text")
    judged, fitted = recipe.evaluation, recipe.calibration
    batch = recipe.batch_rows * recipe.row_tokens
    return Recipe(
        name=recipe.name,
        model=backbone.config,
        tokenizer=None if backbone.tokenizer is None else TokenizerSettings(size=backbone.config.vocab_size),
        text=text,
        tasks=tasks,
        duration=recipe.duration,
        learning_rate=recipe.learning_rate,
        sequence_length=Staircase(starts=(0,), values=(recipe.row_tokens,)),
        batch=BatchRamp(first=batch, last=batch, until=0),
        micro_batch=recipe.micro_rows * recipe.row_tokens,
        evaluation=EvaluationSettings(
            every=judged.every,
            text_rows=judged.text_rows + fitted.text_rows,
            task_rows=judged.task_rows + fitted.task_rows,
        ),
        seed=recipe.seed,
    )


def files_digest(catalog: Catalog) -> str:
    """Return a hash of the stored bytes of every tensor outside the draft module."""
    digest = hashlib.sha256()
    for name, entry in sorted(catalog.tensors.items()):
        if not name.startswith("mtp."):
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            for piece in pieces(entry):
                digest.update(piece.data)
    return digest.hexdigest()
