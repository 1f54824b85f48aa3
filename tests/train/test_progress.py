"""What a run says: lines for people, lines for programs."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from headrace.core.errors import UserError
from headrace.train.progress import MetricsFile, Pace, TensorBoardFile, clock, evaluation_line, progress_line


def pace(**changes: float) -> Pace:
    """Return a run of 600 steps that did 120 of them, 100 in this process, in 50 seconds."""
    values = {
        "share": 0.2,
        "share_here": 100 / 600,
        "step": 120,
        "last_step": 600,
        "tokens": 368640,
        "tokens_here": 307200,
        "seconds": 50.0,
        **changes,
    }
    return Pace(**values)  # type: ignore[arg-type]


def lines_of(folder: Path) -> list[str]:
    """Return the lines of the metrics file."""
    return (folder / "m.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_progress_line_says_step_tokens_loss_bits_speed_and_time_left() -> None:
    wanted = "step 120/600 | 368,640 tokens | loss 2.346 | 2.910 bits/byte | 6,144 tokens/s | 4:00 left"
    assert progress_line(pace(), 2.3456, 2.91) == wanted


def test_a_run_counted_in_tokens_has_no_last_step() -> None:
    assert progress_line(pace(last_step=None), 1.0, None).startswith("step 120 | ")  # type: ignore[arg-type]


def test_before_anything_is_done_nobody_knows_the_time_left() -> None:
    assert "unknown" in progress_line(pace(share_here=0.0, tokens_here=0, seconds=0.0), 1.0, None)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3723, "1:02:03")])
def test_times_are_shown_as_clocks(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_figures_are_named() -> None:
    line = evaluation_line(300, {"held_out_loss": 3.20999, "accuracy.pairs": 0.98125})
    assert line == "after step 300: held_out_loss 3.21, accuracy.pairs 0.9812"


def test_every_metrics_line_is_json_even_without_finite_numbers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", resumed_step=None)
    file.write({"type": "step", "step": 1, "loss": math.nan, "by": {"text": math.inf}, "list": [1.5, -math.inf]})
    file.write({"type": "step", "step": 2, "loss": 1.25})
    file.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in lines_of(tmp_path)]
    assert lines[0] == {"type": "step", "step": 1, "loss": None, "by": {"text": None}, "list": [1.5, None]}
    assert lines[1]["loss"] == 1.25


def test_a_resumed_run_drops_lines_of_steps_that_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"type": "step", "step": 1}\n{"type": "step", "step": 2}\n{"type": "step", "step": 3}\n{"type": "st'
    )
    file = MetricsFile(path, resumed_step=2)
    file.write({"type": "step", "step": 3})
    file.close()
    assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_a_metrics_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        MetricsFile(tmp_path / "missing" / "m.jsonl", resumed_step=None)


def test_a_metrics_file_that_does_not_fit_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(UserError, match="No space left"):
        MetricsFile(tmp_path / "m.jsonl", resumed_step=None)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_used_only_where_it_is_installed(tmp_path: Path) -> None:
    if not TensorBoardFile.is_available():
        with pytest.raises(ImportError):
            TensorBoardFile(tmp_path, resumed_step=None)
        return
    file = TensorBoardFile(tmp_path, resumed_step=None)
    file.write({"type": "step", "step": 1, "loss": 2.0, "by": {"text": 1.0}})
    file.close()
    assert list(tmp_path.iterdir())
