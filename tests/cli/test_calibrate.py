"""`headrace calibrate`: the shipped draft is fitted and judged, the file is what serving reads, and refusals."""

import json
import shutil
from pathlib import Path

import pytest

from headrace import cli
from headrace.checkpoint.weights_digest import weights_digest
from headrace.core.shipped import HELD_OUT_NAME, SHIPPED_MODEL
from headrace.engine.drafting.temperatures import TEMPERATURES_NAME, read_temperatures
from tests.evaluate.subjects import subject_folder
from tests.factories import tiny_checkpoint


def test_the_shipped_draft_is_fitted_to_its_calibration_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert cli.main(["calibrate", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert len(document["temperatures"]) == len(document["ece"]["after"]) == 5
    assert document["source"] == "calibration.safetensors"
    assert (document["rows"], document["documents"], document["ece"]["folds"]) == (30_705, 126, 4)
    assert max(document["ece"]["after"]) <= 0.02
    shipped = json.loads((SHIPPED_MODEL / TEMPERATURES_NAME).read_text())
    assert {**document, "source": shipped["source"]} == shipped
    scale = read_temperatures(out, 5, weights_digest(SHIPPED_MODEL))
    assert list(scale.temperatures) == document["temperatures"]
    assert list(scale.slopes) == document["slopes"]


def test_the_shipped_temperatures_belong_to_the_shipped_draft_and_lower_its_error() -> None:
    path = SHIPPED_MODEL / TEMPERATURES_NAME
    read_temperatures(path, 5, weights_digest(SHIPPED_MODEL))
    document = json.loads(path.read_text())
    errors = document["ece"]
    assert max(errors["after"]) <= 0.02
    means = errors["mean"]
    assert 2 * means["after"] < means["temperatures_alone"] < means["before"]
    assert (document["documents"], document["rows"]) == (126, 30_705)


@pytest.mark.full
def test_the_shipped_temperatures_are_honest_on_the_shipped_held_out_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No document of it is among those that they were fitted to."""
    text = SHIPPED_MODEL / HELD_OUT_NAME
    assert cli.main(["calibrate", "--text", str(text), "--out", str(tmp_path / "found.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = [float(line.split(" before, ")[1].split()[0]) for line in lines[1:6]]
    served = [float(one) for one in lines[6].split("calibration error ")[1].split(" on ")[0].split(", ")]
    assert len(after) == len(served) == 5
    assert max(after) <= 0.02
    assert max(served) <= 0.02


def test_what_was_drafted_along_a_text_is_kept_and_gives_the_same_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = subject_folder()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    lines = [json.loads(line) for line in (folder.parent / "held.jsonl").read_text().splitlines()]
    words = " ".join(line["text"] for line in lines).split()
    long = [{**lines[0], "name": str(part), "text": " ".join(words[part::2])} for part in range(2)]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, long)))
    text, rows = str(tmp_path / "held.jsonl"), copy / "calibration.safetensors"
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    scale = json.loads((SHIPPED_MODEL / TEMPERATURES_NAME).read_text())
    (copy / TEMPERATURES_NAME).write_text(json.dumps(scale))
    assert cli.main(["calibrate", str(copy), "--text", text, "--collect", str(rows), "--out", str(first)]) == 0
    assert cli.main(["calibrate", str(copy), "--out", str(second)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("written: ") == 2
    assert "beside the draft cannot be judged: " in printed  # it is of other weights: a new fit is the way out of it
    one, other = (json.loads(path.read_text()) for path in (first, second))
    assert (one.pop("source"), other.pop("source")) == ("greedy continuations of held.jsonl", rows.name)
    assert one == other


def test_lines_say_the_error_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(SHIPPED_MODEL), "--out", str(tmp_path / "found.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("calibration.safetensors: fitted to ")
    assert [line.split(":")[0] for line in lines[1:6]] == [f"draft {place}" for place in range(1, 6)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{bare}", "--out", "{tmp}/a.json"], "calibration.safetensors does not exist"),
        (["{tmp}/nothing", "--out", "{tmp}/a.json"], "is not a folder"),
        (["--out", "{tmp}/no/a.json"], "its folder does not exist"),
        (["--out", "{tmp}"], "is not a regular file"),
        (["--out", "{tmp}/a.json", "--text", "{tmp}/none.jsonl"], "none.jsonl"),
        (["--out", "{tmp}/a.json", "--text", "{tmp}/none.jsonl", "--threads", "0"], "threads"),
        (["--out", "{tmp}/a.json", "--text", "{tmp}/none.jsonl", "--kernels", "fast"], "kernels are 'fast'"),
        (["--out", "{tmp}/a.json", "--collect", "{tmp}/rows"], "--collect keeps what --text drafts"),
        (
            ["--out", "{tmp}/a.json", "--text", "{tmp}/none.jsonl", "--collect", "{tmp}/bare/../a.json"],
            "two files are accepted",
        ),
        (
            ["--out", "{tmp}/a.json", "--text", "{tmp}/none.jsonl", "--collect", "{tmp}/no/rows"],
            "folder does not exist",
        ),
        (["{damaged}", "--out", "{tmp}/a.json"], "cannot be read as a safetensors file"),
        ([], "--out"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_checkpoint(tmp_path / "bare")
    damaged = Path(shutil.copytree(bare, tmp_path / "damaged"))
    (damaged / "calibration.safetensors").write_bytes(b"\x00" * 40)
    names = {"tmp": str(tmp_path), "bare": str(bare), "damaged": str(damaged)}
    assert cli.main(["calibrate", *(one.format(**names) for one in arguments)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "a.json").exists()
