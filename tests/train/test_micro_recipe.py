"""The recipe `micro` as it is, which takes minutes, so only in the full run; and its control, which must fail.

The control is the same run in which global entries hold nothing.
"""

import json
from pathlib import Path

import pytest

from headrace.train.evaluate import Evaluation
from headrace.train.loop import StepRecord
from headrace.train.progress import Pace
from headrace.train.recipe import Recipe
from headrace.train.recipes import load_recipe
from headrace.train.run import train

CHANCE = 1 / 12  # the values of a row are twelve different ones
CPU_SECONDS = 600


class Silent:
    """Watches a run and says nothing."""

    def on_start(self, _summary: object) -> None:
        """Hear nothing."""

    def on_step(self, _record: StepRecord, _pace: Pace) -> None:
        """Say nothing."""

    def on_evaluation(self, _evaluation: Evaluation) -> None:
        """Say nothing."""

    def on_saved(self, _checkpoint: Path) -> None:
        """Say nothing."""


def carry_out(recipe: Recipe, folder: Path) -> list[dict[str, float]]:
    """Run to the end and return the metrics."""
    assert train(recipe, folder, Silent()).is_done
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(folder: Path) -> dict[str, bytes]:
    """Return the files of the last checkpoint."""
    (checkpoint,) = folder.glob("step-*")
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.full
def test_micro_learns_text_and_the_pair_probe_and_the_window_alone_cannot(tmp_path: Path) -> None:
    metrics = carry_out(load_recipe("micro"), tmp_path / "once")
    assert sum(line["cpu_seconds"] for line in metrics if line["type"] == "step") < CPU_SECONDS
    judged = [line for line in metrics if line["type"] == "evaluation"]
    assert judged[-1]["held_out_bits_per_byte"] < judged[0]["held_out_bits_per_byte"] - 0.5
    assert judged[-1]["accuracy.pairs"] >= 0.95
    carry_out(load_recipe("micro"), tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "once")


@pytest.mark.full
def test_without_global_entries_the_probe_stays_at_chance(tmp_path: Path) -> None:
    metrics = carry_out(load_recipe("micro-window-only"), tmp_path / "control")
    judged = [line for line in metrics if line["type"] == "evaluation"]
    assert judged[-1]["held_out_bits_per_byte"] < judged[0]["held_out_bits_per_byte"] - 0.5
    assert judged[-1]["accuracy.pairs"] < 2 * CHANCE
