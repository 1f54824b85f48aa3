"""What a recipe's rows are made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.architecture import Engram
from headrace.models.deepseek_v41.config import table_rows
from headrace.text.tokenizer import Tokenizer
from headrace.train.mixture import gather_material, make_task
from headrace.train.recipe import TaskSettings, TextSettings, TokenizerSettings
from tests.train.small_recipe import new_trainer, small_recipe, text_recipe, write_texts


def test_held_out_rows_hold_no_text_that_is_trained_on(tmp_path: Path) -> None:
    material = gather_material(text_recipe(write_texts(tmp_path), tasks=()))
    assert material.tokenizer is not None
    tokenizer = Tokenizer.from_text(material.tokenizer)
    held = {tokenizer.decode(row.token_ids[: row.num_tokens].tolist())[:12] for row in material.held_out}
    assert held
    seen = set()
    for step in range(20):
        batch = material.stream.next_batch(step, 33, 3)
        for row, spans in enumerate(batch.spans):
            for span in spans:
                seen.add(tokenizer.decode(batch.token_ids[row, span.start : span.start + span.length].tolist())[:12])
    assert seen
    assert not held & {text for text in seen if text.startswith("the wheel")}


def test_the_pair_probe_lives_in_reserved_ids_and_its_noise_is_text(tmp_path: Path) -> None:
    material = gather_material(text_recipe(write_texts(tmp_path), text=_text(tmp_path, weight=0.0)))
    batch = material.stream.next_batch(0, 33, 2)
    assert set(batch.kinds) == {("pairs",)}
    assert material.tokenizer is not None
    tokenizer = Tokenizer.from_text(material.tokenizer)
    reserved = [tokenizer.is_special(int(token)) for token in batch.token_ids.reshape(-1)]
    assert sum(reserved) >= 2 * (4 + 7), "pairs and queries"
    assert not all(reserved)


def _text(folder: Path, **changes: Any) -> TextSettings:
    text = text_recipe(folder).text
    assert text is not None
    return replace(text, **changes)


def test_a_bound_on_bytes_keeps_the_same_documents_in_every_run(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 20)
    size = sum(file.stat().st_size for file in texts.iterdir())
    recipe = text_recipe(texts, text=_text(texts, max_bytes=size // 2))
    first, second = gather_material(recipe), gather_material(recipe)
    whole = gather_material(text_recipe(texts))
    assert first.stream.state() == second.stream.state()
    assert first.stream.state()["text_hash"] != whole.stream.state()["text_hash"]
    assert [row.num_tokens for row in first.held_out] == [row.num_tokens for row in second.held_out]


def test_a_saved_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    recipe = text_recipe(write_texts(tmp_path))
    made = gather_material(recipe)
    assert made.tokenizer is not None
    assert gather_material(recipe, made.tokenizer).tokenizer == made.tokenizer
    with pytest.raises(UserError, match="tokenizer"):
        gather_material(recipe, "{}")


def test_a_tokenizer_file_is_read_or_refused(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    recipe = text_recipe(texts)
    made = gather_material(recipe).tokenizer
    assert made is not None
    file = tmp_path / "tokenizer.json"
    file.write_text(made, encoding="utf-8")
    settings = TokenizerSettings(size=400, num_reserved=41, file=str(file))
    assert gather_material(replace(recipe, tokenizer=settings)).tokenizer == made
    with pytest.raises(UserError, match="cannot be read"):
        gather_material(replace(recipe, tokenizer=replace(settings, file=str(tmp_path / "no.json"))))


def test_the_vocabulary_says_how_many_ngram_classes_there_are(tmp_path: Path) -> None:
    recipe = text_recipe(write_texts(tmp_path))
    assert recipe.model is not None
    engram = Engram(
        layer_ids=(1,),
        num_embeddings=table_rows(31, 1, 3, 2),
        max_ngram=3,
        first_prime_above=31,
        num_hashes=2,
        head_dim=32,
        pad_token_id=2,
        compressed_vocab_size=400,
    )
    recipe = replace(recipe, model=replace(recipe.model, engram=engram), duration=1)
    trainer = new_trainer(recipe)
    found = trainer.material.config.engram
    assert found is not None
    assert 1 < found.compressed_vocab_size < 400
    before = trainer.masters.parameters["layers.1.engram.embed.weight"].detach().clone()
    assert not trainer.step().is_skipped
    moved = (trainer.masters.parameters["layers.1.engram.embed.weight"] != before).any(1)
    assert 0 < int(moved.sum()) < len(moved), "rows that were looked up move, others do not"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("no-such-task", {}, "no-such-task"),
        ("pairs", {"num_pairz": 3}, "num_pairz"),
        ("copy", {"encoder": None}, "encoder"),
        ("copy", {}, "vocabulary"),
        ("pairs", {"num_keys": 4}, "4 keys"),
        ("pairs", {"num_pairs": 40, "num_queries": 2}, "40"),
        ("pairs", {"num_keys": "many"}, "cannot be made"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_task(TaskSettings(kind=kind, options=options), None, None)


def test_an_unknown_puzzle_is_refused(tmp_path: Path) -> None:
    recipe = text_recipe(write_texts(tmp_path), tasks=(TaskSettings(kind="retrieval", options={"puzzle": "riddle"}),))
    with pytest.raises(UserError, match="riddle"):
        gather_material(recipe)


def test_too_few_reserved_ids_for_the_probe_are_refused(tmp_path: Path) -> None:
    """Tokens that fill up a vocabulary are reserved too, but not in the same row of ids."""
    recipe = text_recipe(write_texts(tmp_path), tokenizer=TokenizerSettings(size=400, num_reserved=40))
    with pytest.raises(UserError, match="41 reserved ids"):
        gather_material(recipe)


def test_without_text_the_same_rows_come_for_the_same_seed() -> None:
    first, second = (gather_material(small_recipe()).stream.next_batch(0, 27, 3) for _ in range(2))
    assert np.array_equal(first.token_ids, second.token_ids)
