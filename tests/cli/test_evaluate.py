"""`headrace evaluate nano`: one JSON document with the promised fields, and refusals of one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.core import shipped
from headrace.evaluate import report, summary
from tests.evaluate.subjects import SETTINGS, subject_folder, write_subject


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The report on the small checkpoint, through JSON; its lines are made on the way."""
    folder = subject_folder()
    found = report.judge(folder, folder.parent / "held.jsonl", SETTINGS, lambda _line: None)
    lines = "\n".join(summary.lines(found))
    for words in ("bits per byte", "window only", "controls that must fail", "DID NOT FAIL", "pairs", "log_error"):
        assert words in lines
    return dict(json.loads(json.dumps(report.to_json(found), allow_nan=False)))


def test_the_report_has_the_promised_fields(document: dict[str, Any]) -> None:
    for mode in ("full", "replay"):
        for caches in ("fp4", "plain"):
            assert 0 < document["bpb"][mode][caches] < 20
    assert document["bpb"]["tokens"] > 100
    assert set(document["engram"]) == {"normal", "zeroed", "scrambled"}
    assert document["engram"]["normal"] == document["bpb"]["whole_documents"]["fp4"]
    for cell in document["retrieval"]:
        assert {"task", "tokens", "position", "mode", "accuracy", "stderr", "n"} <= set(cell)
    assert 0 <= document["control"]["window_only"] <= 1
    assert document["control"]["chance"] == 1 / 5
    assert document["accepted_per_round"] >= 0
    assert len(document["drafting"]["accepted_per_position"]) == 3
    assert document["drafting"]["proposed"] == 3 * document["drafting"]["rounds"]
    assert 0 < document["pool_recall"] < 1


def test_every_task_is_judged_in_both_modes_and_all_thirds(document: dict[str, Any]) -> None:
    asked = {(cell["task"], cell["position"], cell["mode"]) for cell in document["retrieval"]}
    assert asked >= {  # the other forms are longer than these rows
        (task, position, mode)
        for task in ("pairs", "log_error")
        for position in ("early", "middle", "late")
        for mode in ("full", "replay")
    }
    assert min(cell["nearest"] for cell in document["retrieval"]) > 8  # the window


def test_every_comparison_is_paired_and_a_random_model_fails_its_controls(document: dict[str, Any]) -> None:
    names = {one["name"] for one in document["comparisons"]}
    assert {
        "bpb.fp4: replay minus full",
        "bpb.replay: fp4 minus plain",
        "engram: zeroed minus normal",
        "engram: scrambled minus normal",
        "retrieval.pairs.128: replay minus full",
        "retrieval.pairs.128.full: fp4 minus plain",
        "retrieval.pairs.128.full: window only minus all caches",
        "pool.recall: random blocks minus pool",
        "accepted_per_round: context of another prompt minus own",
    } <= names
    assert all(one["clusters"] >= 2 and one["stderr"] is not None for one in document["comparisons"])
    found = {one["name"]: one["has_failed"] for one in document["controls"]}
    assert found["retrieval.pairs: window only"] is True
    assert found["engram: scrambled minus normal"] is False  # weights that nobody trained have nothing to lose


def test_parts_a_model_does_not_have_are_null(tmp_path: Path) -> None:
    folder = write_subject(tmp_path, draft=False, engram=False)
    few = replace(SETTINGS, rows=2, lengths=SETTINGS.lengths[:1])
    found = report.to_json(report.judge(folder, tmp_path / "held.jsonl", few, lambda _line: None))
    assert (found["engram"], found["accepted_per_round"], found["drafting"]) == (None, None, None)
    assert found["pool_recall"] is not None


def test_the_command_prints_one_document_and_progress_elsewhere(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = subject_folder()
    monkeypatch.setattr("headrace.evaluate.settings.Settings", lambda rows: SETTINGS)
    text = str(folder.parent / "held.jsonl")
    assert cli.main(["evaluate", "nano", str(folder), "--text", text, "--json"]) == 0
    shown = capsys.readouterr()
    printed = json.loads(shown.out)
    assert {**printed, "cpu_seconds": 0} == {**document, "cpu_seconds": 0}  # the same figures every time
    assert "retrieval: pairs, 128 tokens" in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such"], "no-such"),
        (["nano"], "no model ships"),
        (["nano", "{folder}"], "--text FILE"),
        (["nano", "{folder}", "--text", "/no/such/file"], "/no/such/file"),
        (["nano", "{folder}", "--text", "{text}", "--rows", "1"], "rows is 1"),
        (["nano", "{folder}", "--text", "{text}", "--threads", "0"], "0"),
        (["nano", "/no/such/model", "--text", "{text}"], "/no/such/model"),
        (["nano", "{folder}", "--text", "{text}"], "context of 512"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(shipped, "SHIPPED_MODEL", tmp_path / "nothing")
    folder = subject_folder()
    named = {"{folder}": str(folder), "{text}": str(folder.parent / "held.jsonl")}
    status = cli.main(["evaluate", *(named.get(word, word) for word in arguments)])
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    sentence = shown.err.strip().splitlines()[-1]
    assert sentence.startswith("headrace: ")
    assert words in sentence
    assert "Traceback" not in shown.err
