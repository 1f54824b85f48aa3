"""`headrace generate`: the text it streams, the document it prints, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.core.shipped import SHIPPED_MODEL
from tests.factories import tiny_checkpoint, tiny_config
from tests.golden_mini import FOLDER

FIELDS = {"text", "token_ids", "finish_reason", "usage", "timings", "draft", "seed", "numerics"}
TEXT = "the rat ate it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint whose tokenizer knows all text."""
    config = tiny_config(vision=False, max_position_embeddings=2048)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("generate"), config))


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run the command with --json and return its document; nothing else may be printed there."""
    assert main(["generate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[int]]:
    found = document(capsys, *arguments)
    return found["text"], found["token_ids"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    return captured.err


# ---------------------------------------------------------------------------------------------------------- answers


def test_a_prompt_is_read_once_for_every_process_that_names_its_directory(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([3 + place % 40 for place in range(300)]))
    cache = ("--cache-dir", str(tmp_path / "cache"), "--min-free-disk", "0")
    asked = (model, "--token-ids", str(ids), "--max-tokens", "3", "--no-draft")
    alone = document(capsys, *asked)
    first, second = (document(capsys, *asked, *cache) for _ in range(2))
    assert first["token_ids"] == second["token_ids"] == alone["token_ids"]
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens_by_tier"] == {"device": 0, "host": 0, "disk": 256}
    assert not second["is_approximate"]
    assert second["cache_reason"].startswith("windows rebuilt from token")
    third = document(capsys, *asked, *cache, "--resume", "replay")
    assert third["is_approximate"]
    assert main(["generate", *asked, *cache]) == 0
    assert "300 prompt tokens (256 from disk) in" in capsys.readouterr().err


def test_the_document_has_the_fields_of_the_contract(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, model, "--prompt", TEXT, "--max-tokens", "5")
    assert set(found) >= FIELDS
    assert set(found) - FIELDS == {"mode", "work", "cache_reason", "is_approximate"}
    assert set(found["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens", "cached_tokens_by_tier"}
    assert set(found["timings"]) == {"load_s", "image_s", "prefill_s", "decode_s", "ttft_s"}
    assert set(found["draft"]) == {"proposed", "accepted", "rounds"}
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) <= 5
    assert found["usage"]["cached_tokens"] == 0
    assert found["finish_reason"] in {"length", "stop"}
    assert isinstance(found["seed"], int)
    assert found["numerics"].startswith("torch-")
    assert found["mode"] == "replay"
    assert all(value >= 0 for value in found["timings"].values())
    assert found["timings"]["prefill_s"] > 0


def test_text_is_streamed_to_standard_output_and_figures_to_standard_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _ = answer(capsys, model, "--prompt", TEXT, "--max-tokens", "9")
    assert text
    assert main(["generate", model, "--prompt", TEXT, "--max-tokens", "9"]) == 0
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n") == text.removesuffix("\n")
    assert "prompt tokens in" in captured.err
    assert "generated in" in captured.err


def test_text_files_and_ids_are_the_same_prompt(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("né", encoding="utf-8")
    (tmp_path / "ids.json").write_text(json.dumps([256, *"né".encode()]))
    few = ("--max-tokens", "4")
    by_text = answer(capsys, model, "--prompt", "né", *few)
    assert answer(capsys, model, "--prompt-file", str(tmp_path / "prompt.txt"), *few) == by_text
    assert answer(capsys, model, "--token-ids", str(tmp_path / "ids.json"), *few) == by_text


def test_the_prompt_file_is_taken_as_it_is(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\r\nb\n")
    assert document(capsys, model, "--prompt-file", str(file), "--max-tokens", "1")["usage"]["prompt_tokens"] == 6


def test_greedy_answers_repeat_and_sampled_ones_follow_the_seed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = (model, "--prompt", TEXT, "--max-tokens", "6")
    assert answer(capsys, *base) == answer(capsys, *base, "--temperature", "0", "--seed", "5")
    hot = (*base, "--temperature", "1.5")
    first = document(capsys, *hot)
    again = document(capsys, *hot, "--seed", str(first["seed"]))
    assert again["token_ids"] == first["token_ids"]
    assert len({tuple(answer(capsys, *hot, "--seed", str(seed))[1]) for seed in range(2)}) == 2
    assert answer(capsys, *hot, "--top-p", "1e-9") == answer(capsys, *base)


def test_options_reach_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = (model, "--prompt", TEXT, "--max-tokens", "6")
    full = document(capsys, *base, "--mode", "full", "--no-draft", "--threads", "1")
    replay = document(capsys, *base, "--no-draft", "--threads", "1")
    assert (full["mode"], replay["mode"]) == ("full", "replay")
    assert (full["work"]["replayed_rows"], replay["work"]["replayed_rows"]) == (0, 8)
    drafted = document(capsys, *base, "--threads", "1")
    assert drafted["token_ids"] == replay["token_ids"]
    assert drafted["draft"].keys() == replay["draft"].keys()  # how many rounds come so early is up to what steps take
    assert drafted["draft"]["accepted"] <= drafted["draft"]["proposed"] <= 5 * drafted["draft"]["rounds"]
    assert replay["draft"] == {"proposed": 0, "accepted": 0, "rounds": 0}
    text, token_ids = full["text"], full["token_ids"]
    stop = text[1:2]
    stopped = document(capsys, *base, "--mode", "full", "--stop", stop, "--stop", "never this")
    assert stopped["text"] == text.partition(stop)[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == token_ids[: len(stopped["token_ids"])]


def test_a_long_prompt_shows_progress_and_leaves_the_document_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([5] * 1100))
    assert main(["generate", model, "--token-ids", str(tmp_path / "ids.json"), "--max-tokens", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["usage"]["prompt_tokens"] == 1100
    assert "reading" in captured.err
    assert "1100" in captured.err or "1.10k" in captured.err


def test_ids_work_without_a_tokenizer_where_there_is_no_n_gram_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_checkpoint(tmp_path, tiny_config(engram=False, vision=False, draft=False))
    (bare / "tokenizer.json").unlink()
    (tmp_path / "ids.json").write_text("[3, 4]")
    text, token_ids = answer(capsys, str(bare), "--token-ids", str(tmp_path / "ids.json"), "--max-tokens", "3")
    assert (text, len(token_ids)) == ("", 3)
    assert main(["generate", str(bare), "--token-ids", str(tmp_path / "ids.json"), "--max-tokens", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == token_ids
    assert "has no tokenizer.json" in refused(capsys, str(bare), "--prompt", "a")


def test_the_real_command_prints_one_document(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 3, 4, 5]")
    command = [sys.executable, "-m", "headrace", "generate", str(FOLDER), "--token-ids", str(tmp_path / "ids.json")]
    done = subprocess.run(
        [*command, "--max-tokens", "3", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["token_ids"]) == 3
    assert done.stderr == ""


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of the arguments --prompt --prompt-file --token-ids is required"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with argument"),
        (["--prompt-file", "/no/such/file"], "cannot read /no/such/file"),
        (["--token-ids", "/no/such/file"], "cannot read /no/such/file"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "a", "--top-p", "0"], "top_p is 0.0"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "a", "--seed", "-1"], "seed is -1"),
        (["--prompt", "a", "--seed", "9223372036854775808"], "seed is 9223372036854775808"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--threads", "0"], "0"),
        (["--prompt", "a", "--mode", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_wrong_use_is_refused(model: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert words in refused(capsys, model, *options)


def test_a_prompt_file_must_be_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    assert "not UTF-8: byte 2" in refused(capsys, model, "--prompt-file", str(tmp_path / "prompt.txt"))


def test_a_prompt_longer_than_the_context_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([5] * 2049))
    sentence = refused(capsys, model, "--token-ids", str(tmp_path / "ids.json"))
    assert "the prompt has 2049 tokens; the model's context is 2048 tokens" in sentence


def test_a_path_that_leads_nowhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such/model does not exist" in refused(capsys, "/no/such/model", "--prompt", "a")


def test_without_a_path_the_shipped_model_answers_or_its_absence_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    if (SHIPPED_MODEL / "config.json").is_file():
        found = document(capsys, "--prompt", "a", "--max-tokens", "2")
        assert found["usage"]["completion_tokens"] >= 1
    else:
        sentence = refused(capsys, "--prompt", "a")
        assert "no model ships with this version" in sentence
        assert "a checkpoint folder is accepted" in sentence
