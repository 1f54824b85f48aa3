"""Refused inputs end the real command with exit status 2 and one sentence that names the thing; nothing is written."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.weights import load_weights, save_weights
from headrace.text.synthetic import make_tokenizer, tokenizer_bytes
from tests import damage
from tests.golden_mini import FOLDER, config

IDS = [7, 8, 9, 10]
PATIENCE = 300  # seconds; a run takes two of its own, and a busy machine may give it a hundredth of a core
WKV = "layers.2.attn.wkv"


def copied(folder: Path, change: damage.Change = lambda _: None) -> Path:
    return damage.copy_with(FOLDER, folder / "model", change)


def damaged(change: damage.Change) -> Callable[[Path], Path]:
    return lambda folder: copied(folder, change)


def without_a_shard(folder: Path) -> Path:
    save_weights(load_weights(FOLDER, config()), folder / "model", max_shard_bytes=2_000_000)
    next((folder / "model").glob("model-00002-*.safetensors")).unlink()
    return folder / "model"


def short_by_a_byte(folder: Path) -> Path:
    return damage.cut_byte(copied(folder))


def with_config(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        document = json.loads((copied(folder) / "config.json").read_text())
        change(document)
        (folder / "model" / "config.json").write_text(json.dumps(document))
        return folder / "model"

    return make


def without_its_tokenizer(folder: Path) -> Path:
    (copied(folder) / "tokenizer.json").unlink()
    return folder / "model"


def with_another_tokenizer(folder: Path) -> Path:
    (copied(folder) / "tokenizer.json").write_bytes(tokenizer_bytes(make_tokenizer(512, 300, {})))
    return folder / "model"


def row_of_the_third_token() -> int:
    """Return the first row that the third of `IDS` reads from the second table."""
    addressing = load_model(FOLDER).model.addressing
    assert addressing is not None
    history = addressing.history(addressing.compress(np.array(IDS)), addressing.fresh())
    return int(addressing.row_ids(history)[2, 1, 0])


def with_a_damaged_row(folder: Path) -> Path:
    return copied(folder, damage.set_byte("layers.4.engram.embed.scale", row_of_the_third_token(), 255))


MODELS = {
    "missing shard": (without_a_shard, r"shard model-00002-of-\d+\.safetensors, named by \S+, is missing"),
    "file shorter by one byte": (short_by_a_byte, r"model\.safetensors .*\d+ bytes.*1 bytes are missing"),
    "unknown tensor": (
        damaged(damage.put(f"{WKV}.bias", torch.ones(2))),
        rf"tensor {WKV}\.bias, which .* not call for",
    ),
    "missing tensor": (damaged(damage.drop(f"{WKV}.scale")), rf"tensor {WKV}\.scale, which .* is missing"),
    "wrong dtype": (
        damaged(damage.cast(f"{WKV}.weight", torch.bfloat16)),
        rf"{WKV}\.weight .* BF16; F8_E4M3 is expected",
    ),
    "scale of the wrong shape": (
        damaged(damage.put(f"{WKV}.scale", torch.ones(2, 4).to(torch.float8_e8m0fnu))),
        rf"{WKV}\.scale .* shape \[2, 4\]; \[2, 8\] is expected",
    ),
    "scale byte 255": (damaged(damage.set_byte(f"{WKV}.scale", 11, 255)), rf"{WKV}\.scale .* 255 \(NaN\) at \[1, 3\]"),
    "wrong ratio list length": (
        with_config(lambda document: document["text_config"]["compress_ratios"].pop()),
        r"11 compress_ratios; 12 are expected",
    ),
    "unknown key that matters": (
        with_config(lambda document: document["text_config"].update(attention_gain=2)),
        r"attention_gain",
    ),
    "token map of the wrong size": (with_another_tokenizer, r"300.*256|256.*300"),
    "no tokenizer for the n-grams": (without_its_tokenizer, r"tokenizer\.json is missing; .* 256 token classes"),
    "damaged n-gram row": (with_a_damaged_row, r"n-gram table of layer 4: row \d+ holds a scale byte of 255"),
    "no such folder": (lambda folder: folder / "nowhere", r"nowhere does not exist"),
}


def refused(command: str, model: Path, ids: list[int], folder: Path) -> str:
    """Run a command on token ids in a process of its own and return its one sentence."""
    (folder / "ids.json").write_text(json.dumps(ids))
    out = folder / "out.safetensors"
    options = ["--out", str(out)] if command == "trace" else ["--json"]
    arguments = [sys.executable, "-m", "headrace", command, str(model), "--token-ids", str(folder / "ids.json")]
    done = subprocess.run([*arguments, *options], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("*out.safetensors*"))
    return done.stderr


@pytest.mark.parametrize("what", MODELS)
def test_a_checkpoint_that_is_not_right_is_refused(tmp_path: Path, what: str) -> None:
    make, words = MODELS[what]
    command = "trace" if list(MODELS).index(what) % 2 else "generate"
    sentence = refused(command, make(tmp_path), IDS, tmp_path)
    assert re.search(words, sentence), sentence


@pytest.mark.parametrize("command", ["trace", "generate"])
def test_a_token_id_out_of_range_is_refused(tmp_path: Path, command: str) -> None:
    assert "token id 512 at" in refused(command, FOLDER, [*IDS, 512], tmp_path)


@pytest.mark.parametrize("command", ["trace", "generate"])
def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path, command: str) -> None:
    sentence = refused(command, FOLDER, [7] * 161, tmp_path)
    assert "161 tokens" in sentence
    assert "context" in sentence
    assert "160 tokens" in sentence


def test_a_damaged_row_is_named_and_prompts_that_do_not_read_it_run(tmp_path: Path) -> None:
    model = with_a_damaged_row(tmp_path)
    sentence = refused("generate", model, IDS, tmp_path)
    assert f"table of layer 4: row {row_of_the_third_token()} " in sentence
    (tmp_path / "ids.json").write_text(json.dumps(IDS[:2]))
    arguments = ["generate", str(model), "--token-ids", str(tmp_path / "ids.json"), "--max-tokens", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
