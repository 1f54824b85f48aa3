"""What a draft run refuses before it trains, in one sentence that says what would be accepted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.train.backbone import files_digest, find_checkpoint, load_backbone, with_draft
from headrace.train.calibration import Calibration, calibration_bytes, read_calibration, rounds
from headrace.train.draft_export import Proof, export_draft
from headrace.train.draft_recipe import (
    CalibrationSettings,
    ContinuationSettings,
    DraftLossWeights,
    DraftRecipe,
    DraftSettings,
)
from headrace.train.masters import init_masters
from headrace.train.recipe import EvaluationSettings, TextSettings
from headrace.train.recipes import load_recipe
from headrace.train.run import train
from tests.factories import tiny_checkpoint, tiny_config
from tests.train.small_draft import Silent, backbone_recipe, draft, draft_recipe
from tests.train.small_recipe import small_recipe, write_texts


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that stopped after its first step."""
    folder = tmp_path_factory.mktemp("backbone")
    train(backbone_recipe(write_texts(folder / "texts")), folder / "run", Silent(), last_step=1)
    return folder / "run"


def refused(tmp_path: Path, backbone: Path | None, words: str, recipe: DraftRecipe | None = None) -> None:
    with pytest.raises(UserError, match=words):
        draft(tmp_path / "out", backbone, recipe)
    assert not list((tmp_path / "out").glob("step-*"))


def test_a_draft_recipe_needs_a_backbone_and_another_recipe_takes_none(backbone: Path, tmp_path: Path) -> None:
    refused(tmp_path, None, "'small-draft' trains a draft module and --backbone is missing")
    with pytest.raises(UserError, match="'small' trains a whole model and takes no --backbone"):
        train(small_recipe(), tmp_path / "whole", Silent(), backbone=backbone)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, tmp_path / "nowhere", "nowhere holds no checkpoint")
    (tmp_path / "empty").mkdir()
    refused(tmp_path, tmp_path / "empty", "empty holds no checkpoint; a folder with a config.json, or")


def test_a_run_stands_for_its_newest_checkpoint(backbone: Path, tmp_path: Path) -> None:
    (checkpoint,) = backbone.glob("step-*")
    assert find_checkpoint(backbone) == find_checkpoint(checkpoint) == checkpoint.resolve()
    for step in ("step-00000003", "step-00000020"):
        (tmp_path / step).mkdir()
    assert find_checkpoint(tmp_path).name == "step-00000020"


def test_a_backbone_without_the_tapped_layers_is_refused(backbone: Path, tmp_path: Path) -> None:
    recipe = draft_recipe(draft=DraftSettings(tap_layers=(1, 3), block_size=3))
    refused(tmp_path, backbone, r"dspark_target_layer_ids \[1, 3\]; backbone layers from 0 to 2", recipe)
    recipe = draft_recipe(draft=DraftSettings(noise_token_id=400))
    refused(tmp_path, backbone, "dspark_noise_token_id 400; ids below the vocab_size of 400", recipe)
    recipe = draft_recipe(draft=DraftSettings(num_experts=2, experts_per_token=3))
    refused(tmp_path, backbone, "dspark_num_experts_per_tok 3; at most the 2", recipe)
    refused(tmp_path, backbone, r"sequence_length \[200\]; 1 to 128 tokens are", draft_recipe(row_tokens=200))


def test_what_a_recipe_leaves_open_is_taken_from_the_backbone() -> None:
    config = tiny_config(draft=False, vision=False)
    found = with_draft(config, DraftSettings(num_layers=2)).draft
    assert found is not None
    assert (found.tap_layers, found.noise_token_id) == ((4, 5, 6), config.pad_token_id)
    assert (found.num_experts, found.experts_per_token) == (config.num_experts, config.experts_per_token)
    assert with_draft(replace(config, num_layers=7), DraftSettings(num_layers=2)).compress_ratios[-2:] == (0, 0)


def test_a_wrong_tokenizer_is_refused(backbone: Path, tmp_path: Path) -> None:
    """A changed file beside its checksum; without one, too many ids, or other classes for the n-gram tables."""
    (checkpoint,) = backbone.glob("step-*")
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    document = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    document["model"]["vocab"]["another"] = 400
    (copy / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json: its content does not match the checksum"):
        load_backbone(copy, "bfloat16")
    shutil.rmtree(copy / "resume")
    with pytest.raises(UserError, match="is this the model's own tokenizer"):
        load_backbone(copy, "bfloat16")
    bare = tiny_checkpoint(tmp_path, tiny_config(engram=False))
    shutil.copy(copy / "tokenizer.json", bare / "tokenizer.json")
    with pytest.raises(UserError, match="has 401 ids and the backbone 320"):
        load_backbone(bare, "bfloat16")


def test_a_bare_checkpoint_needs_a_recipe_with_text(backbone: Path, tmp_path: Path) -> None:
    (checkpoint,) = backbone.glob("step-*")
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    refused(tmp_path, copy, "neither text nor tasks, and no recipe lies beside")
    (copy / "tokenizer.json").unlink()
    shutil.rmtree(copy / "resume")
    refused(tmp_path, copy, "tokenizer.json is missing")
    engramless = tiny_checkpoint(tmp_path, tiny_config(engram=False))
    (engramless / "tokenizer.json").unlink()
    refused(tmp_path, engramless, "has no tokenizer.json", draft_recipe(text=TextSettings()))


def test_rows_that_are_asked_for_and_not_there_are_refused(backbone: Path, tmp_path: Path) -> None:
    settings = CalibrationSettings(text_rows=0, task_rows=4)
    refused(
        tmp_path,
        backbone,
        "calibration of the recipe asks for 0 rows of text and 4",
        draft_recipe(tasks=(), calibration=settings),
    )


def test_a_backbone_with_draft_and_vision_keeps_its_tower_and_gets_a_new_draft(tmp_path: Path) -> None:
    config = tiny_config()
    loaded = load_backbone(tiny_checkpoint(tmp_path, config), "float32")
    assert (loaded.stored, loaded.config.draft, loaded.config.vision) == (config, None, None)
    wanted = with_draft(loaded.config, DraftSettings(num_layers=1, markov_rank=9))
    proof = Proof(recipe="r", step=0, backbone="b", values_before="", values_after="", files_before="", data=None)
    with pytest.raises(UserError, match=r"files of the backbone .* changed"):
        export_draft(init_masters(wanted, 0, prefix="mtp."), loaded, tmp_path / "out", proof, None)
    assert not (tmp_path / "out").exists()
    proof = replace(proof, files_before=files_digest(loaded.catalog))
    export_draft(init_masters(wanted, 0, prefix="mtp."), loaded, tmp_path / "out", proof, None)
    model = load_model(tmp_path / "out", LoadOptions(has_draft=True, has_vision=True)).model
    assert (model.config.vision, model.config.num_draft_layers) == (config.vision, 1)
    assert model.parameters.vision


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_tokens": 4}, "row_tokens 4; at least 5"),
        ({"anchors_per_row": 0}, "anchors_per_row 0"),
        ({"duration": 0}, "duration 0"),
        ({"group_changes": {"no_such_group": {}}}, "no_such_group"),
    ],
)
def test_a_recipe_that_does_not_fit_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        draft_recipe(**changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DraftSettings(block_size=0),
        lambda: DraftSettings(num_experts=0),
        lambda: DraftLossWeights(decay=0.0),
        lambda: DraftLossWeights(variation=-1.0),
        lambda: ContinuationSettings(tokens=0),
        lambda: ContinuationSettings(regenerated_share=1.5),
        lambda: ContinuationSettings(temperature=-0.1),
        lambda: CalibrationSettings(text_rows=-1),
        lambda: EvaluationSettings(task_rows=-1),
    ],
)
def test_settings_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(UserError, match="accepted"):
        make()


def test_the_named_recipe_fits_the_model_of_micro() -> None:
    recipe, other = load_recipe("micro-draft"), load_recipe("micro")
    assert isinstance(recipe, DraftRecipe)
    assert not isinstance(other, DraftRecipe)
    assert other.model is not None
    assert with_draft(other.model, recipe.draft).draft is not None
    assert set(recipe.rule_changes()) == set(recipe.group_changes)
    assert draft_recipe(update="adamw").rule_changes()["experts"] == {"update": "adamw", "decay": 0.0}


def example(**changes: Any) -> Calibration:
    """Return three anchors of two drafts."""
    tensors = {
        "confidence": torch.tensor([[0.5, -1.0], [2.0, 0.0], [-3.0, 1.0]]),
        "accepted": torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.uint8),
        "acceptance": torch.tensor([[0.7, 0.4], [0.9, 0.8], [0.1, 0.2]]),
        "document": torch.tensor([0, 0, 4]),
        "position": torch.tensor([7, 8, 3]),
        "is_round": torch.tensor([1, 0, 1], dtype=torch.uint8),
    }
    return Calibration(**{**tensors, **changes})


def shaped(*sizes: int) -> Calibration:
    """Return anchors with drafts of any shape."""
    accepted = torch.zeros(sizes, dtype=torch.uint8)
    return example(confidence=torch.zeros(sizes), accepted=accepted, acceptance=torch.zeros(sizes))


def test_calibration_data_comes_back_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    path.write_bytes(calibration_bytes(example()))
    found = read_calibration(tmp_path)
    assert torch.equal(found.confidence, example().confidence)
    assert found.num_rows == 3
    assert found.rounds.document.tolist() == [0, 4]
    compact = replace(example(), acceptance=None).compact
    path.write_bytes(calibration_bytes(compact))
    found = read_calibration(tmp_path)
    assert found.acceptance is None
    assert found.rounds.confidence.tolist() == [[0.5, -1.0], [-3.0, 1.0]]
    assert {tensor.dtype for tensor in compact.tensors.values()} == {torch.float16, torch.uint8, torch.int32}
    for wrong, words in [
        (example(confidence=torch.zeros(3, 2, dtype=torch.float64)), "confidence"),
        (shaped(3), "two dimensions"),
        (shaped(3, 0), "two dimensions"),
        (shaped(3, 2, 2), "two dimensions"),
        (example(position=torch.tensor([1, 2])), "position"),
        (example(acceptance=torch.zeros(3, 1)), "acceptance"),
        (example(accepted=torch.tensor([[0, 1], [1, 1], [0, 0]], dtype=torch.uint8)), "falling row"),
    ]:
        path.write_bytes(calibration_bytes(wrong))
        with pytest.raises(UserError, match=words):
            read_calibration(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        read_calibration(tmp_path)


def test_a_round_begins_behind_what_the_one_before_emitted() -> None:
    accepted = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [1, 1]]).numpy()
    assert rounds(accepted).tolist() == [True, False, False, True, False, True, True]
