"""`headrace train --backbone` as a user runs it: hashes shown, resuming, drafts that trace, one-sentence refusals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.train.recipe import SaveSettings
from headrace.train.recipe_json import to_json
from headrace.train.run import train
from tests.train.small_draft import Silent, backbone_recipe, draft_recipe
from tests.train.small_recipe import small_recipe, write_texts


def headrace(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "headrace", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(headrace(*arguments), capture_output=True, text=True, timeout=300, check=False)


def files_of(out: Path) -> dict[str, bytes]:
    (checkpoint,) = out.glob("step-*")
    return {str(path.relative_to(out)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    train(backbone_recipe(write_texts(folder / "texts")), folder / "run", Silent(), last_step=2)
    return folder / "run"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "draft.json"
    path.write_text(json.dumps(to_json(draft_recipe(duration=6, saving=SaveSettings(every=0)))), encoding="utf-8")
    return path


def test_a_draft_run_that_a_signal_ends_goes_on_with_the_same_bits_and_traces(
    backbone: Path, recipe: Path, tmp_path: Path
) -> None:
    whole = run("train", recipe, "--out", tmp_path / "whole", "--backbone", backbone)
    assert whole.returncode == 0, whole.stderr
    hashes = [line.rpartition(" ")[2] for line in whole.stderr.splitlines() if line.startswith("backbone ")]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    process = subprocess.Popen(
        headrace("train", recipe, "--out", tmp_path / "part", "--backbone", backbone),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, deadline = tmp_path / "part" / "metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and '"step": 1,' in metrics.read_text(encoding="utf-8"):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    shown, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert "stopped; go on with --resume" in shown
    resumed = run("train", recipe, "--out", tmp_path / "part", "--resume")
    assert "done after step 6" in resumed.stdout, resumed.stderr
    assert files_of(tmp_path / "part") == files_of(tmp_path / "whole")
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(3, 25))), encoding="utf-8")
    (checkpoint,) = (tmp_path / "whole").glob("step-*")
    traced = run(
        "trace", checkpoint, "--token-ids", ids, "--draft", "--mode", "full", "--out", tmp_path / "t.safetensors"
    )
    assert traced.returncode == 0, traced.stderr


def test_wrong_use_is_refused_in_one_sentence(backbone: Path, recipe: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(to_json(small_recipe())), encoding="utf-8")
    for arguments, words in [
        ((recipe,), "--backbone is missing"),
        ((whole, "--backbone", backbone), "takes no --backbone"),
        ((recipe, "--backbone", tmp_path), "holds no checkpoint"),
    ]:
        done = run("train", *arguments, "--out", tmp_path / "run")
        assert done.returncode == 2
        (sentence,) = done.stderr.strip().splitlines()
        assert words in sentence
