"""A request that fails in the middle of a step fails alone."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.engine.answer import Answer
from headrace.engine.core import answering
from headrace.engine.sampling.pipeline import RowError
from headrace.models.deepseek_v41.load import load_model
from tests import damage
from tests.engine.core.serving import SEEDED, Client, alone, core, params, prompt, said
from tests.golden_mini import FOLDER
from tests.traces import golden_model


def test_a_damaged_row_fails_the_request_that_reads_it_and_not_those_beside_it(tmp_path: Path) -> None:
    addressing = golden_model().addressing
    assert addressing is not None
    ids = addressing.compress(np.arange(100))
    rows = [addressing.row_ids(addressing.history(ids[i : i + 1], addressing.fresh()))[0, 1] for i in range(100)]
    row = int(rows[7][0])
    good, other = [token_id for token_id in range(100) if row not in rows[token_id]][:2]
    change = damage.set_byte("layers.4.engram.embed.weight", row * 32 + 5, 0x7F)
    model = load_model(damage.copy_with(FOLDER, tmp_path / "damaged", change)).model
    told = []
    for healthy in (True, False):
        client = Client(core(golden_model() if healthy else model))
        client.submit("good", [good], params(max_tokens=5))
        client.step(2)
        client.submit("bad", [7], params(max_tokens=5, n=2))
        client.submit("other", [other], params(max_tokens=3))
        client.finish()
        told.append([said(client.results[name][0]) for name in ("good", "other")])
        assert client.core.free_blocks + client.core.cached_blocks == client.core.memory.num_blocks
    assert told[0] == told[1]
    assert sorted(client.errors) == ["bad"]
    assert client.errors["bad"].kind == "UserError"
    assert f"table of layer 4: row {row} holds an E4M3 NaN code" in client.errors["bad"].message
    assert "bad" not in client.results


def test_a_row_that_cannot_be_sampled_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client, real = Client(core()), answering.sample_batch

    def sample_batch(logits: object, samplers: list[object]) -> object:
        for row, sampler in enumerate(samplers):
            if sampler.seed == 99 and sampler.position > 21:
                raise RowError("no token", row) from UserError("nothing is allowed", "structured")
        return real(logits, samplers)

    monkeypatch.setattr(answering, "sample_batch", sample_batch)
    for name, seed in (("a", 7), ("bad", 99), ("b", 7)):
        client.submit(name, prompt(20, seed=len(name)), params(max_tokens=5, **SEEDED | {"seed": seed}))
    client.finish()
    assert sorted(client.errors) == ["bad"]
    assert client.errors["bad"].message == "nothing is allowed"
    for name in "ab":
        assert said(client.results[name][0]) == alone(tuple(prompt(20, seed=1)), count=5, **SEEDED)


def test_one_of_several_answers_that_fails_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    client, real = Client(core()), Answer.take

    def take(self: Answer, token_id: int, logits_V: object) -> str:
        if len(self.token_ids) == 2 and self.sampler.seed != SEEDED["seed"] and len(self.prompt_ids) == 30:
            raise UserError("the structure became too complex", "structured")
        return real(self, token_id, logits_V)

    monkeypatch.setattr(Answer, "take", take)
    client.submit("several", prompt(30), params(n=3, **SEEDED))
    client.submit("other", prompt(40), params())
    client.finish()
    assert sorted(client.errors) == ["several"]
    assert client.results.keys() == {"other"}
    assert said(client.results["other"][0]) == alone(tuple(prompt(40)))
    assert client.core.free_blocks + client.core.cached_blocks == client.core.memory.num_blocks
