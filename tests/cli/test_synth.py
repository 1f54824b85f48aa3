import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.models.deepseek_v41.config import to_json
from tests.factories import tiny_config
from tests.release import DOCUMENT


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(to_json(tiny_config())))
    return tmp_path / "tiny.json"


def test_a_checkpoint_can_be_made_and_verified(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["synth", str(tiny), "--out", str(out), "--seed", "3"]) == 0
    assert "752 tensors" in capsys.readouterr().out
    assert main(["inspect", str(out), "--verify"]) == 0
    # a folder serves as a configuration too
    assert main(["synth", str(out), "--out", str(tmp_path / "again"), "--seed", "3"]) == 0
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (out / file).read_bytes()


def test_a_folder_in_use_is_left_alone(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", str(tiny), "--out", str(tmp_path)]) == 2
    assert "is not empty; a new or empty folder is accepted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json"]


def test_a_model_larger_than_the_disk_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**11})())
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT))
    assert main(["synth", str(tmp_path / "config.json"), "--out", str(tmp_path / "out")]) == 2
    assert "needs 510,286,023,000 bytes and the disk has 100,000,000,000 bytes free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
