"""Draft training end to end: it learns, the backbone stays, what is saved serves as trained, and runs resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.checkpoint.catalog import open_catalog
from headrace.checkpoint.reader import read_tensor
from headrace.core.errors import UserError
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.trace import TraceOptions, trace
from headrace.train.backbone import load_backbone
from headrace.train.calibration import Calibration, read_calibration, rounds
from headrace.train.draft_evaluate import HeldOut, collect, greedy_figures
from headrace.train.draft_loop import DraftLoop
from headrace.train.recipe_json import from_json, to_json
from headrace.train.run import Outcome
from tests.train.small_draft import Silent, draft, draft_recipe, train_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def whole(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Silent, Path]:
    out = tmp_path_factory.mktemp("whole") / "run"
    return *draft(out, backbone), out


def loop_of(backbone: Path) -> DraftLoop:
    """Return the run's work before the first step."""
    recipe = draft_recipe()
    return DraftLoop(recipe, load_backbone(backbone, recipe.numerics))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_loss_falls_on_the_batches_and_on_held_out_rows(whole: tuple[Outcome, Silent, Path]) -> None:
    outcome, heard, _ = whole
    assert outcome.is_done
    losses = [record.loss for record in heard.steps]
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
    first, last = (evaluation.values for evaluation in (heard.evaluations[0], heard.evaluations[-1]))
    assert last["held_out_loss"] < first["held_out_loss"]
    assert all(0 < record.num_anchors <= 45 for record in heard.steps), "nine anchors a row at most, five rows"


def test_the_backbone_has_one_hash_before_and_after_and_its_bytes_are_copied(
    backbone: Path, whole: tuple[Outcome, Silent, Path]
) -> None:
    outcome, heard, out = whole
    (before, first), (after, last) = heard.proofs
    assert (before, after, first) == ("before", "after", last)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["when"], line["sha256"]) for line in lines if line["type"] == "backbone"] == heard.proofs
    said = json.loads((outcome.checkpoint / "draft.json").read_text(encoding="utf-8"))["backbone"]
    assert said["values_sha256"] == {"before": first, "after": first}
    assert said["files_sha256"]["before"] == said["files_sha256"]["after"]
    old, new = (open_catalog(path).tensors for path in (next(backbone.glob("step-*")), outcome.checkpoint))
    assert {name for name in new if not name.startswith("mtp.")} == set(old)
    for name, entry in old.items():
        pair = [read_tensor(one).view(torch.uint8) for one in (entry, new[name])]
        assert torch.equal(*pair), name


def test_a_backbone_that_moves_is_an_error_and_nothing_is_saved(backbone: Path, tmp_path: Path) -> None:
    loop = loop_of(backbone)
    loop.step()
    assert loop.prove() == loop.values_before
    loop.masters.parameters["layers.1.ffn.experts.w2"].data[0, 0, 0] += 1.0
    with pytest.raises(UserError, match="backbone moved"):
        loop.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_step_moves_every_draft_parameter_and_none_other(backbone: Path) -> None:
    loop = loop_of(backbone)
    before = {name: tensor.detach().clone() for name, tensor in loop.masters.parameters.items()}
    biases = {name: tensor.clone() for name, tensor in loop.masters.buffers.items()}
    for _ in range(2):
        loop.step()
    moved = {name for name, tensor in loop.masters.parameters.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith("mtp.")}
    assert set(loop.optimizer.owners) == moved
    shifted = {name for name, tensor in loop.masters.buffers.items() if not torch.equal(tensor, biases[name])}
    assert shifted == {"mtp.0.ffn.gate.bias", "mtp.1.ffn.gate.bias"}


def test_the_checkpoint_generates_as_the_backbone_does(backbone: Path, whole: tuple[Outcome, Silent, Path]) -> None:
    prompt, params = "the wheel 3 turns", SamplingParams(max_tokens=9)
    assert load_model(whole[0].checkpoint, LoadOptions(has_draft=True)).model.parameters.draft is not None
    with LLM(whole[0].checkpoint, threads=1, load=LoadOptions(has_draft=True)) as llm:
        with_draft = llm.generate(prompt, params)[0].token_ids
    with LLM(next(backbone.glob("step-*")), threads=1) as llm:
        assert with_draft == llm.generate(prompt, params)[0].token_ids


def check_against_serving(checkpoint: Path, held: HeldOut) -> Calibration:
    """Trace the continued documents with drafts and compare; the known token is then the model's own choice."""
    data, block, checked = read_calibration(checkpoint), 3, 0
    model = load_model(checkpoint, LoadOptions(has_draft=True)).model
    for place in np.unique(data.document.numpy()).tolist():
        ids, of_document = torch.from_numpy(held.continued[place].token_ids), data.document == place
        positions = data.position[of_document]
        assert positions.tolist() == list(range(held.prompts[place] - 1, len(ids) - block - 1))
        how = TraceOptions(mode="full", has_draft=True, draft_start=int(positions[0]))
        served = trace(model, ids.numpy(), how)
        drafted = served["draft.ids"][0, : len(positions)]
        assert torch.equal(drafted[:, 0], ids[positions + 1]), "the backbone's own continuation"
        assert torch.equal(served["draft.confidence"][0, : len(positions)], data.confidence[of_document])
        follows = ids[positions.unsqueeze(1) + torch.arange(2, block + 2)]
        pairs = zip(drafted[:, 1:], follows, strict=True)
        counts = [next((k for k in range(block) if ours[k] != theirs[k]), block) for ours, theirs in pairs]
        assert data.accepted[of_document].sum(1).tolist() == counts
        checked += len(positions)
    assert checked == data.num_rows > 20
    return data


def test_calibration_data_is_what_serving_drafts(backbone: Path, whole: tuple[Outcome, Silent, Path]) -> None:
    data = check_against_serving(whole[0].checkpoint, loop_of(backbone).fitted)
    assert ((data.acceptance >= 0) & (data.acceptance <= 1)).all()
    assert data.confidence.std() > 0


def test_calibration_data_is_what_serving_accepts(backbone: Path, tmp_path: Path) -> None:
    """A draft that says one token of a continuation again and again is right there and wrong elsewhere."""
    loop = loop_of(backbone)
    token = int(loop.fitted.continued[0].token_ids[loop.fitted.prompts[0] + 3])
    with torch.no_grad():
        loop.masters.parameters["mtp.1.markov_head.embed.weight"].fill_(1.0)
        loop.masters.parameters["mtp.1.markov_head.head.weight"].zero_()[token] = 100.0
    loop.export(tmp_path / "out")
    data = check_against_serving(tmp_path / "out", loop.fitted)
    assert data.accepted[:3, 0].tolist() == [0, 0, 1], "two anchors see it too late in their block"
    assert 0 < int(data.accepted.sum()) < data.accepted.numel()


def test_stopping_and_resuming_gives_the_files_of_an_uninterrupted_run(
    backbone: Path, whole: tuple[Outcome, Silent, Path], tmp_path: Path
) -> None:
    """The cut lies between two saves; the resumed run finds its backbone by itself."""
    cut = 3
    asked = iter([False] * cut + [True])
    part, _ = draft(tmp_path / "part", backbone, should_stop=lambda: next(asked))
    assert (part.step, part.is_done) == (cut, False)
    rest, heard = draft(tmp_path / "part", None, is_resumed=True)
    assert [record.step for record in heard.steps] == list(range(cut + 1, 13))
    assert bytes_of(rest.checkpoint) == bytes_of(whole[0].checkpoint)


def test_a_resumed_run_on_another_backbone_is_refused(backbone: Path, tmp_path: Path) -> None:
    draft(tmp_path / "part", backbone, last_step=1)
    other = tmp_path / "other"
    loop = loop_of(backbone)
    loop.export(other)
    assert load_backbone(other, "bfloat16").recipe == loop.data
    catalog = open_catalog(other).tensors
    entry = catalog["norm.weight"]
    data = bytearray(entry.file.read_bytes())
    data[entry.offset] ^= 1
    entry.file.write_bytes(data)
    with pytest.raises(UserError, match="another backbone"):
        draft(tmp_path / "part", other, is_resumed=True)


def test_a_draft_recipe_is_json_and_back(whole: tuple[Outcome, Silent, Path]) -> None:
    assert from_json(json.loads(json.dumps(to_json(draft_recipe())))) == draft_recipe()
    assert from_json(json.loads((whole[2] / "recipe.json").read_text(encoding="utf-8"))) == draft_recipe()


def test_a_draft_that_copies_the_target_is_accepted_whole(backbone: Path) -> None:
    """With the drafts replaced by the document, every round takes the block and one more."""
    loop = loop_of(backbone)
    found = collect(loop.trainer, loop.options, loop.judged, 3)
    assert found is not None
    walked = np.concatenate(
        [rounds(np.ones((int((found.document == place).sum()), 3))) for place in found.document.unique().tolist()]
    )
    perfect = Calibration(
        confidence=found.confidence,
        accepted=torch.ones_like(found.accepted),
        acceptance=found.acceptance,
        document=found.document,
        position=found.position,
        is_round=torch.from_numpy(walked).to(torch.uint8),
    )
    kinds = [sample.kind for sample in loop.judged.continued]
    assert set(kinds) == {"text", "pairs"}
    figures = greedy_figures(perfect, kinds)
    assert figures["accepted_per_round"] == figures["accepted_per_round.text"] == 3.0
    assert figures["accepted.3"] == 1.0
    assert bool((torch.from_numpy(walked)[1:4] == torch.tensor([False, False, False])).all())
