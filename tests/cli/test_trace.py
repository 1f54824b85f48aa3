"""`headrace trace`: what it writes, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.cli import main
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER, config, golden, run
from tests.models.test_cached_golden import differences
from tests.traces import differing, same_bits

GOLDEN = str(FOLDER / "golden.safetensors")


def write_ids(folder: Path, ids: object, name: str = "ids.json") -> str:
    (folder / name).write_text(json.dumps(ids))
    return str(folder / name)


def golden_ids(prefix: str = "text.") -> list[int]:
    return run(prefix)["input_ids"][0].tolist()


def traced(tmp_path: Path, *options: str, ids: object = None, model: Path = FOLDER) -> dict[str, Tensor]:
    """Run the command, check that it succeeds, and return the tensors of the file it wrote."""
    out = tmp_path / "out.safetensors"
    given = write_ids(tmp_path, golden_ids() if ids is None else ids)
    assert main(["trace", str(model), "--token-ids", given, "--out", str(out), *options]) == 0
    return load_file(out)


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, ids: object = None) -> str:
    """Run the command, check that it refuses with one sentence and writes nothing, and return the sentence."""
    out = tmp_path / "out.safetensors"
    given = write_ids(tmp_path, golden_ids()[:20] if ids is None else ids)
    assert main(["trace", str(FOLDER), "--token-ids", given, "--out", str(out), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    assert not out.exists()
    return captured.err


# ---------------------------------------------------------------------------------------------------------- output


def test_fed_with_the_golden_file_it_writes_the_golden_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(tmp_path, "--mode", "full", "--feed", GOLDEN, "--prefix", "text.", "--draft")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "610 layer-rows" in captured.err
    assert differences(found, run("text.")) == []
    expected = run("decode_own.")
    assert int((found["draft.ids"] == expected["dspark_ids"])[0, :10].all(1).sum()) >= 9
    assert found["draft.logits"].shape == expected["dspark_logits"].shape
    assert found["draft.confidence"].shape == expected["dspark_confidence"].shape


def test_the_file_has_the_tensors_of_the_contract(tmp_path: Path) -> None:
    found = traced(tmp_path, "--draft")
    whole = {"input_ids", "embeds", "logits_all", "main_hidden", "engram_hash_ids"}
    drafts = {"draft.ids", "draft.logits", "draft.confidence"}
    layered = {
        f"layers.{i}.{name}"
        for i in range(10)
        for name in ("x_in", "x_out", "attn_in", "attn_out", "ffn_in", "ffn_out")
    }
    layered |= {f"layers.{i}.topk" for i in config().index_sources}
    layered |= {f"layers.{i}.{name}" for i in config().kv_sources for name in ("compress_kv", "index_k")}
    layered |= {f"layers.{config().candidate_source}.candidates"}
    assert whole | drafts | layered <= set(found)
    assert set(found) - whole - drafts - layered == {f"layers.{i}.pre_in" for i in range(10)}
    assert found["input_ids"].tolist() == [golden_ids()]


def test_replay_is_the_default_and_leaves_rows_out(tmp_path: Path) -> None:
    default, replay = traced(tmp_path), traced(tmp_path, "--mode", "replay")
    assert differing(default, replay) == []
    missing = replay["layers.6.x_out"][0].flatten(1).isnan().all(1)
    assert missing.tolist() == [position < 61 - 16 for position in range(61)]
    assert not replay["layers.5.x_out"].isnan().any()
    assert (replay["layers.8.topk"][0, :45] == -1).all()
    assert (replay["layers.6.candidates"][0, :45] == 0).all()


def test_chunks_and_splits_change_no_bit(tmp_path: Path) -> None:
    full, replay = traced(tmp_path, "--mode", "full"), traced(tmp_path)
    assert differing(traced(tmp_path, "--mode", "full", "--split", "47"), full) == []
    assert differing(traced(tmp_path, "--mode", "full", "--chunk", "7", "--split", "55"), full) == []
    assert differing(traced(tmp_path, "--mode", "full", "--chunk", "9"), full) == []
    assert differing(traced(tmp_path, "--chunk", "9"), replay) == []


@pytest.mark.parametrize("names", ["bare", "prefixed"])
def test_images_come_from_a_file(tmp_path: Path, names: str) -> None:
    images = tmp_path / "images.safetensors"
    prefix = "" if names == "bare" else "image."
    save_file({prefix + name: run("image.")[name] for name in ("patches", "token_types")}, images)
    options = ("--mode", "full", "--images", str(images))
    found = traced(tmp_path, *options, ids=golden_ids("image."))
    assert torch.equal(found["engram_hash_ids"], run("image.")["engram_hash_ids"])
    again = traced(tmp_path, "--mode", "full", "--images", GOLDEN, "--prefix", "image.", ids=golden_ids("image."))
    assert differing(again, found) == []


def test_fed_image_runs_write_the_golden_tensors(tmp_path: Path) -> None:
    options = ("--mode", "full", "--images", GOLDEN, "--feed", GOLDEN, "--prefix", "image.")
    assert differences(traced(tmp_path, *options, ids=golden_ids("image.")), run("image.")) == []


def test_index_scores_can_be_float32(tmp_path: Path) -> None:
    fed = ("--mode", "full", "--feed", GOLDEN, "--prefix", "text.")
    coarse, fine = traced(tmp_path, *fed), traced(tmp_path, *fed, "--index-scores", "fp32")
    assert not all(same_bits(coarse[f"layers.{i}.topk"], fine[f"layers.{i}.topk"]) for i in config().index_sources)
    # the first index source sees the same input in both recorded runs
    assert torch.equal(fine["layers.2.topk"], run("text_fp32idx.")["layers.2.topk"])


def test_drafts_start_where_asked(tmp_path: Path) -> None:
    every = traced(tmp_path, "--mode", "full", "--draft")
    late = traced(tmp_path, "--mode", "full", "--draft", "--draft-start", "50")
    assert (every["draft.ids"].shape, late["draft.ids"].shape) == ((1, 61, 4), (1, 11, 4))
    assert same_bits(late["draft.logits"], every["draft.logits"][:, 50:].contiguous())
    assert every["draft.ids"][0, :, 0].tolist() == every["logits_all"][0].argmax(1).tolist()


def test_a_model_without_tables_drafts_and_tower_leaves_their_tensors_out(tmp_path: Path) -> None:
    plain = tiny_config(engram=False, draft=False, vision=False, candidate_source_layer_id=-1)
    model = tiny_checkpoint(tmp_path, plain)
    (model / "tokenizer.json").unlink()
    found = traced(tmp_path, "--mode", "full", ids=[3, 4, 5, 319], model=model)
    assert {"engram_hash_ids", "main_hidden"} & set(found) == set()
    assert not any("candidates" in name for name in found)
    assert found["logits_all"].shape == (1, 4, 320)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "does not hold a list of token ids"),
        ({"ids": [1]}, "does not hold a list of token ids"),
        ([1, "2"], "has '2' at index 1"),
        ([1, 2.5], "has 2.5 at index 1"),
        ([True], "has True at index 0"),
        ([1, -3], "token id -3 at index 1"),
        ([1, 512], "token id 512 at position 1 is not in the vocabulary; accepted are 0 to 511"),
        ([1] * 161, "161 tokens do not fit the model's context of 160 tokens"),
    ],
)
def test_wrong_token_ids_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: object, words: str
) -> None:
    assert words in refused(tmp_path, capsys, ids=ids)


@pytest.mark.parametrize("options", [("--chunk", "20"), ("--mode", "full", "--chunk", "3"), ("--chunk", "1")])
def test_late_mistakes_are_found_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    from headrace.models.deepseek_v41 import model

    def computed(*_: object) -> None:
        raise AssertionError("a layer ran")

    monkeypatch.setattr(model.DeepseekV41, "_layer", computed)
    assert "token id 600 at position 59" in refused(tmp_path, capsys, *options, ids=[*[1] * 59, 600])
    assert "170 tokens do not fit" in refused(tmp_path, capsys, *options, ids=[1] * 170)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "0"], "--split is 0; a number from 1 up is accepted"),
        (["--mode", "full", "--split", "21"], "a split after 21 tokens is not possible; accepted is 1 to 20"),
        (["--split", "4"], "accepted in full mode only"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--threads", "0"], "0"),
        (["--draft-start", "-1"], "--draft-start is -1"),
        (["--draft", "--draft-start", "20"], "a draft start of 20 is past the last position 19"),
        (["--prefix", "text."], "--prefix names tensors of a feed or image file, and none was given"),
        (["--feed", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--images", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
        (["--feed", GOLDEN, "--prefix", "nothing."], "the feed file has no tensor nothing.layers.0.x_in"),
        (["--feed", GOLDEN, "--prefix", "text."], "feed tensor text.layers.0.x_in has shape [1, 61, 4, 256], expected"),
        (["--images", GOLDEN, "--prefix", "image."], "has token_types for 35 tokens, the sequence has 20"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(tmp_path, capsys, *options)


def test_a_feed_or_image_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors here")
    for option in ("--feed", "--images"):
        assert "broken.safetensors cannot be read" in refused(tmp_path, capsys, option, str(broken))
    save_file({"patches": torch.zeros(54, 3, 14, 14)}, broken)
    assert "has no tensor token_types" in refused(tmp_path, capsys, "--images", str(broken))
    types = run("image.")["token_types"][:, :20]
    save_file({"patches": torch.zeros(54, 3, 10, 10), "token_types": types}, broken)
    assert "patches have shape [54, 3, 10, 10]" in refused(tmp_path, capsys, "--images", str(broken))
    save_file({"patches": torch.zeros(55, 3, 14, 14), "token_types": types}, broken)
    assert "55 patches do not fill the images" in refused(tmp_path, capsys, "--images", str(broken))


def test_drafts_need_their_part_of_the_feed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = tmp_path / "feed.safetensors"
    parts = {name: tensor for name, tensor in golden().items() if name.startswith("text.layers.")}
    taps, known = run("text.")["main_hidden"], run("decode_own.")["dspark_ids"]
    for more, words in (
        ({}, "no tensor text.main_hidden, which --draft needs"),
        ({"text.main_hidden": taps}, "no tensor decode_own.dspark_ids, which --draft needs"),
        ({"text.main_hidden": taps[:, 1:].contiguous(), "decode_own.dspark_ids": known}, "has shape [1, 60, 512], exp"),
        ({"text.main_hidden": taps, "decode_own.dspark_ids": torch.ones(1, 62, 4)}, "has shape [1, 62, 4], expected"),
    ):
        save_file(parts | more, feed)
        options = ("--mode", "full", "--feed", str(feed), "--prefix", "text.", "--draft")
        assert words in refused(tmp_path, capsys, *options, ids=golden_ids())


def test_parts_the_model_has_not_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path, tiny_config(draft=False, vision=False))
    ids, out = write_ids(tmp_path, [1] * 35), tmp_path / "out.safetensors"
    for options, words in (
        (["--draft"], "the model has no draft module"),
        (["--images", GOLDEN, "--prefix", "image."], "the model has no image tower"),
    ):
        assert main(["trace", str(model), "--token-ids", ids, "--out", str(out), *options]) == 2
        assert words in capsys.readouterr().err
        assert not out.exists()


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_ids(tmp_path, [1, 2, 3])
    for out, words in (
        (tmp_path, "the name of a file to write is accepted"),
        (tmp_path / "no" / "out.safetensors", "cannot be written"),
    ):
        assert main(["trace", str(FOLDER), "--token-ids", ids, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ids.json"]
