"""What the backbone writes itself: greedily its own choice, otherwise its own distribution, whatever is beside it."""

import numpy as np
import pytest
import torch

from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train import continuations
from headrace.train.continuations import Prompt, Target, continue_samples, cut_prompt
from headrace.train.data.draws import Draws
from headrace.train.data.packing import IGNORE, Sample, next_token_labels, text_sample
from tests.factories import tiny_checkpoint, tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("target"), tiny_config(vision=False), 0)).model


def prompts(*lengths: int, room: int = 6) -> list[Prompt]:
    random = np.random.default_rng(5)
    return [Prompt(random.integers(3, 250, length), room, Draws(1, length)) for length in lengths]


def logits_of(model: DeepseekV41, ids: np.ndarray) -> torch.Tensor:
    return model.forward([Span(model.new_state(), ids, len(ids))], wants_all_logits=True).logits


def test_a_greedy_continuation_is_the_arg_max_at_every_position(model: DeepseekV41) -> None:
    for prompt, ids in zip(prompts(4, 21, 9), Target(model, 320).continue_all(prompts(4, 21, 9), 0.0), strict=True):
        start = len(prompt.token_ids)
        assert ids[:start].tolist() == prompt.token_ids.tolist()
        assert logits_of(model, ids[:-1])[start - 1 :].argmax(-1).tolist() == ids[start:].tolist()
        assert len(ids) == start + 6 or ids[-1] == model.config.eos_token_id


def test_a_continuation_does_not_depend_on_the_others(model: DeepseekV41, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Target(model, 320).continue_all(prompts(7, 13, 5), 0.7)
    monkeypatch.setattr(continuations, "_PREFILL_TOKENS", 8)
    alone = [Target(model, 320).continue_all([one], 0.7)[0] for one in prompts(7, 13, 5)]
    in_groups = Target(model, 320).continue_all(prompts(7, 13, 5), 0.7)
    for first, second, third in zip(together, alone, in_groups, strict=True):
        assert first.tolist() == second.tolist() == third.tolist()


def test_ids_without_a_token_are_not_written_and_the_end_token_ends(model: DeepseekV41) -> None:
    few = Target(model, 5).continue_all(prompts(7, 13, room=12), 1.0)
    assert all(max(ids[length:]) < 5 for ids, length in zip(few, (7, 13), strict=True))
    one = Target(model, 320).continue_all(prompts(7, room=1), 1.0)[0]
    assert len(one) == 8
    end = int(Target(model, 320).continue_all(prompts(7, room=1), 0.0)[0][-1])
    object.__setattr__(model.config, "eos_token_id", end)
    try:
        assert len(Target(model, 320).continue_all(prompts(7, room=5), 0.0)[0]) == 8
    finally:
        object.__setattr__(model.config, "eos_token_id", 257)


def test_samples_follow_the_distribution(model: DeepseekV41) -> None:
    """Of 2,000 draws at temperature 2, each of the likely tokens is within five deviations of its share."""
    (prompt,) = prompts(6, room=1)
    chances = torch.softmax(logits_of(model, prompt.token_ids)[-1].double() / 2.0, -1).numpy()
    logits = logits_of(model, prompt.token_ids)[-1]
    drawn = [continuations._choose(logits, 2.0, Draws(9, number)) for number in range(2000)]
    counts = np.bincount(drawn, minlength=len(chances))
    likely = np.argsort(-chances)[:10]
    deviation = np.sqrt(2000 * chances[likely] * (1 - chances[likely]))
    assert (np.abs(counts[likely] - 2000 * chances[likely]) < 5 * deviation).all()
    assert len(set(drawn)) > 20


def test_only_what_was_written_is_asked(model: DeepseekV41) -> None:
    sample = text_sample(np.arange(3, 33))
    (new,) = continue_samples(Target(model, 320), [sample], [11], [Draws(0)], tokens=7, temperature=0.0)
    assert new.token_ids[:11].tolist() == sample.token_ids[:11].tolist()
    assert np.flatnonzero(new.labels != IGNORE).tolist() == list(range(10, len(new) - 1))
    assert (new.labels[10:-1] == new.token_ids[11:]).all()
    (short,) = continue_samples(Target(model, 320), [sample], [28], [Draws(0)], tokens=7, temperature=0.0)
    assert len(short) <= 30, "no longer than the document it stands for"


def test_prompts_end_in_the_middle_half_of_text_and_where_tasks_begin_to_ask() -> None:
    text = text_sample(np.arange(40))
    cuts = {cut_prompt(text, 3, Draws(seed)) for seed in range(200)}
    assert cuts == set(range(10, 31))
    assert {cut_prompt(text_sample(np.arange(7)), 3, Draws(seed)) for seed in range(50)} == {1, 2}
    assert cut_prompt(text_sample(np.arange(5)), 3, Draws(0)) is None
    is_asked = np.arange(12) >= 5
    task = Sample(token_ids=np.arange(12), labels=next_token_labels(np.arange(12), is_asked), kind="copy")
    assert cut_prompt(task, 3, Draws(0)) == 5, "token 5 is the first that is asked"
    assert cut_prompt(task, 6, Draws(0)) is None
