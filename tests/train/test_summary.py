"""What a run says before its first step."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.train.recipe import LossSettings
from headrace.train.recipes import load_recipe
from headrace.train.schedule import Staircase
from headrace.train.summary import summarise, summary_lines, untaught_sources
from tests.train.small_recipe import new_trainer, small_recipe, text_recipe, write_texts


def test_bytes_of_every_update_rule_stand_beside_those_of_adam() -> None:
    trainer = new_trainer(small_recipe())
    found = summarise(trainer)
    rules = found["optimizer_state"]
    assert set(rules) == {"muon", "adamw", "sinkhorn"}
    assert sum(one["parameters"] for one in rules.values()) == found["parameters"]
    assert found["parameters"] == sum(value.numel() for value in trainer.masters.parameters.values())
    assert all(one["adam_bytes"] == 8 * one["parameters"] for one in rules.values())
    assert rules["muon"]["bytes_per_parameter"] == 4.0, "one momentum"
    assert 8.0 <= rules["adamw"]["bytes_per_parameter"] < 8.6, "two moments and a count of steps"
    assert rules["sinkhorn"]["bytes_per_parameter"] == 4.0, "one momentum; rows and columns are balanced anew"
    lines = summary_lines(found)
    assert lines[0].startswith(f"{found['parameters']:,} parameters; update rules keep 0.")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["muon", "adamw", "sinkhorn"]


def test_texts_are_named_with_their_licences(tmp_path: Path) -> None:
    (text,) = summarise(new_trainer(text_recipe(write_texts(tmp_path / "texts"))))["texts"]
    assert (text["source"], text["licence"], text["num_documents"]) == ("folder:texts", "MIT", 9)


@pytest.mark.parametrize(("longest", "untaught"), [(9, [0, 1, 2]), (14, [0]), (15, [])])
def test_sources_that_never_choose_are_named(longest: int, untaught: list[int]) -> None:
    """With a window of 4 and 5 picks, the first choice is at position 9 of single tokens and 14 of pairs."""
    recipe = small_recipe(sequence_length=Staircase(starts=(0,), values=(longest,)))
    assert untaught_sources(recipe) == untaught
    summary = {"parameters": 1, "optimizer_state": {}, "untaught": untaught, "texts": []}
    assert len(summary_lines(summary)) == (2 if untaught else 1)
    assert untaught_sources(replace(recipe, losses=LossSettings(index=0.0))) == []


@pytest.mark.parametrize("name", ["micro", "tiny-v4", "tiny-v41", "v4-flash"])
def test_recipes_that_come_with_headrace_teach_every_indexer(name: str) -> None:
    assert untaught_sources(load_recipe(name)) == []
