"""Recipes as values: what they refuse, and that they survive being written down."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import UserError
from headrace.train.published import PUBLISHED, TRILLION
from headrace.train.recipe import EvaluationSettings, LossSettings, Phase, SourceSettings, TextSettings
from headrace.train.recipe_json import difference, from_json, to_json
from headrace.train.recipes import RECIPES, load_recipe
from headrace.train.schedule import Position, Staircase
from tests.train.small_recipe import small_recipe, text_recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_named_recipe_survives_json(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


def test_a_recipe_with_text_survives_json(tmp_path: Path) -> None:
    recipe = text_recipe(tmp_path)
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("path", "name"),
    [((), "learning_rat"), (("losses",), "balnce"), (("phases", 0), "kuant"), (("learning_rate", "warmup"), "step")],
)
def test_an_unknown_field_is_refused_by_name(path: tuple[Any, ...], name: str) -> None:
    document = to_json(small_recipe())
    place = document
    for part in path:
        place = place[part]
    place[name] = 1
    with pytest.raises(UserError, match=f"unknown field '{name}'"):
        from_json(document)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("duration", 1.5, "whole number"),
        ("duration", True, "whole number"),
        ("numerics", "float8", "float32"),
        ("phases", {}, "list"),
        ("seed", None, "whole number"),
        ("has_recomputation", 1, "true or false"),
        ("model", {"text_config": {}}, "model"),
        ("learning_rate", {"warmup": {"steps": 1}, "parts": [{"value": 1.0}]}, "until"),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: Any, words: str) -> None:
    document = to_json(small_recipe())
    document[field] = value
    with pytest.raises(UserError, match=words):
        from_json(document)


def test_a_missing_field_is_refused_by_name() -> None:
    document = to_json(small_recipe())
    del document["duration"]
    with pytest.raises(UserError, match="lacks the field 'duration'"):
        from_json(document)


def test_a_difference_names_the_field_and_both_values_and_skips_what_may_differ() -> None:
    ours = to_json(small_recipe(seed=1, evaluation=EvaluationSettings(every=1)))
    theirs = to_json(small_recipe())
    assert difference(ours, theirs) == "seed (0, now 1)"
    assert (
        difference(to_json(small_recipe(losses=LossSettings(index_rows=7))), theirs) == "losses.index_rows (11, now 7)"
    )
    assert difference(to_json(small_recipe(threads=2)), theirs) is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"duration": 0}, "duration"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"phases": ()}, "phases"),
        ({"phases": (Phase(start=1),)}, "phases"),
        ({"phases": (Phase(), Phase())}, "phases"),
        ({"embedding_deviation": 0.0}, "embedding_deviation"),
        ({"tasks": ()}, "text"),
        ({"text": TextSettings()}, "tokenizer"),
        ({"sequence_length": Staircase(starts=(0,), values=(1024,))}, "sequence_length"),
        ({"group_changes": {"no_such_group": {"rate": 2.0}}}, "no_such_group"),
        ({"model": None}, "obstacle"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=name) as refused:
        small_recipe(**changes)
    assert refused.value.param == name or name in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Phase(exact_share=1.5),
        lambda: LossSettings(index=-1.0),
        lambda: LossSettings(index_rows=0),
        lambda: SourceSettings(kind="folder"),
        lambda: TextSettings(sources=()),
        lambda: TextSettings(fim_rate=2.0),
    ],
)
def test_parts_refuse_values_out_of_range(make: Any) -> None:
    with pytest.raises(UserError):
        make()


def test_the_phase_of_a_place_is_the_latest_that_began() -> None:
    recipe = small_recipe()
    assert [recipe.phases.index(recipe.phase_at(step, 0)) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    in_tokens = dataclasses.replace(recipe, unit="tokens")
    assert in_tokens.phases.index(in_tokens.phase_at(0, 4)) == 1


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_recipes_hold_the_published_numbers(name: str) -> None:
    recipe, published = RECIPES[name](), PUBLISHED[name]
    assert (recipe.family, recipe.duration, recipe.unit) == (published.family, published.tokens, "tokens")
    middle = Position(steps=10**6, tokens=8 * TRILLION)
    assert recipe.learning_rate.at(middle) == published.peak
    assert recipe.learning_rate.at(Position(steps=10**6, tokens=published.tokens)) == published.final
    assert recipe.bias_speed.at(middle) == 1e-3
    assert recipe.losses.balance == 1e-4
    assert recipe.batch.last == published.batch_last
    assert recipe.sequence_length.values == published.lengths
    assert recipe.obstacle is not None


def test_v4_is_dense_first_then_warms_the_indexer_up_and_v41_is_sparse_from_the_start() -> None:
    v4 = RECIPES["v4-flash"]()
    assert [(phase.attention, phase.trains) for phase in v4.phases] == [
        ("dense", "backbone"),
        ("dense", "indexer"),
        ("sparse", "all"),
    ]
    assert {phase.attention for phase in RECIPES["v4.1-flash"]().phases} == {"sparse"}


def test_recipes_come_from_python_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom headrace.train.recipes.micro import micro\n"
        "def recipe():\n    return replace(micro(), name='mine', seed=5)\n"
    )
    assert (load_recipe(str(path)).name, load_recipe(str(path)).seed) == ("mine", 5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return replace(micro(), learning_rat=1)", "learning_rat"),
        ("return 3", "int"),
        ("return replace(micro(), duration=0)", "duration"),
        ("raise ValueError('no luck')", "no luck"),
    ],
)
def test_a_python_file_that_makes_no_recipe_is_refused(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "mine.py"
    head = "from dataclasses import replace\nfrom headrace.train.recipes.micro import micro\ndef recipe():\n    "
    path.write_text(head + body + "\n")
    with pytest.raises(UserError, match=words):
        load_recipe(str(path))


def test_a_python_file_without_the_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("recipes = 3\n")
    with pytest.raises(UserError, match=r"mine\.py has no function recipe\(\)"):
        load_recipe(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("name", ["no-such-recipe", "no-such.json", "no-such.py"])
def test_an_unknown_recipe_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no-such"):
        load_recipe(name)
