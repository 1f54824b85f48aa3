import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import main
from tests import damage
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER
from tests.release import DOCUMENT

FIELDS = {
    "model_type",
    "num_tensors",
    "total_bytes",
    "bytes_by_dtype",
    "layers",
    "kv_bytes_per_token",
    "window_bytes_per_sequence",
    "state_bytes_per_sequence",
    "parameters",
    "active_parameters",
    "contexts",
    "numerics",
}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DOCUMENT))
    return file


def test_json_has_the_promised_fields_and_nothing_else_is_printed(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(release), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert set(result) == FIELDS
    assert captured.err == ""
    assert (result["num_tensors"], result["total_bytes"]) == (96_085, 510_286_023_000)


def test_the_released_configuration_takes_less_than_two_seconds_and_no_torch(release: Path) -> None:
    script = "import sys; from headrace.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(release), "--json"], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, "inspect must not load torch"
    assert time.perf_counter() - start < 20, "far above the promised two seconds, even for a busy machine"


def test_people_get_a_table(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(release)]) == 0
    text = capsys.readouterr().out
    for words in (
        "96,085",
        "510,286,023,000 bytes",
        "890 bytes",
        "933,232,640",
        "16.13 B",
        "7.90 B",
        "551.88 B",
        "196.61 B",
    ):
        assert words in text
    lines = [line.split() for line in text.splitlines()]
    assert ["3-7", "encoder", "reuse", "2", "2", "2"] in lines
    assert ["20", "decoder", "full", "1", "20", "20", "candidate", "pool"] in lines
    assert ["40-42", "draft", "window", "0", "-", "-"] in lines
    assert max(map(len, text.splitlines())) <= 120


def test_a_folder_is_reported_from_its_own_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FOLDER), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_tensors"], result["total_bytes"]) == (962, 10_512_226)
    assert main(["inspect", str(FOLDER / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert main(["inspect", str(FOLDER / "inference_config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_verify_reads_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FOLDER), "--verify"]) == 0
    assert "every tensor was read" in capsys.readouterr().out
    table = "layers.1.engram.embed.weight"
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", damage.set_byte(table, 32 * 900 + 3, 0x7F))
    assert main(["inspect", str(folder)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder), "--verify", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{table} in" in captured.err
    assert "an E4M3 NaN code at [900, 3]" in captured.err


def test_verify_checks_the_token_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config())
    other = tiny_checkpoint(tmp_path / "other", tiny_config(engram_compressed_vocab_size=270))
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(folder), "--verify"]) == 2
    assert "270 classes but the configuration says 280" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main(["inspect", str(folder), "--verify"]) == 2
    assert "tokenizer.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (damage.drop("norm.weight"), "tensor norm.weight, which the configuration calls for, is missing"),
        (damage.set_byte("head.weight", 0, 0), None),
    ],
)
def test_headers_are_always_held_against_the_configuration(
    tmp_path: Path, change: damage.Change, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damage.copy_with(FOLDER, tmp_path / "damaged", change)
    assert main(["inspect", str(folder)]) == (2 if words else 0)
    assert (words or "") in capsys.readouterr().err


def test_a_configuration_alone_has_nothing_to_verify(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(release), "--verify", "--json"]) == 0
    captured = capsys.readouterr()
    assert "has no weights" in captured.err
    json.loads(captured.out)


def test_a_folder_without_weights_is_refused(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(release.parent)]) == 2
    assert "holds neither model.safetensors nor" in capsys.readouterr().err
