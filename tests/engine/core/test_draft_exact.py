"""Block verification in the engine: with any drafter the answers have the model's own distribution."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pytest
import torch

from headrace.engine.core.core import EngineCore
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.drafting.proposal import Proposal
from headrace.models.deepseek_v41.batch import Span
from tests.engine.core.serving import Client, core, params, prompt, tiny

TOKENS = (30, 31, 32)
LENGTH, SLOTS = 3, 32
IDS = prompt(12, 3)
CHI_SQUARE_26 = 54.05  # the quantile 0.999 at 26 degrees of freedom
OPTIONS = {"num_slots": SLOTS, "is_audited": False}
SAMPLING = {"temperature": 0.9, "logit_bias": tuple((token, 60.0) for token in TOKENS)}


class Opinionated:
    """Draws guesses from logits of its own, which know nothing of the model; or always guesses the same."""

    name = "opinionated"
    max_guesses = 2
    wants_taps = False

    def __init__(self, *, is_drawn: bool) -> None:
        self.is_drawn = is_drawn
        self.logits = torch.zeros(tiny().config.vocab_size)
        self.logits[list(TOKENS)] = torch.tensor([1.0, 0.0, -1.0])

    def observe(self, committed: Sequence[Committed]) -> None:
        """Know nothing."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        return [self._one(one) for one in wanted]

    def _one(self, wanted: Wanted) -> Proposal:
        if not self.is_drawn:
            return Proposal(self.name, (TOKENS[0], TOKENS[1])[: wanted.count])
        ids = [wanted.choice.pick(self.logits) for _ in range(wanted.count)]
        return Proposal(self.name, tuple(one for one in ids if one is not None), wanted.choice.probabilities())

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is kept."""


def answers(engine: EngineCore, count: int, **how: object) -> list[tuple[int, ...]]:
    """Return `count` answers, each with a seed of its own, as many at once as there are slots."""
    client = Client(engine)
    for wave in range(count // SLOTS):
        client.submit(str(wave), IDS, params(max_tokens=LENGTH, n=SLOTS, **{**SAMPLING, "seed": wave, **how}))
        client.finish()
    assert not client.errors
    return [tuple(one.token_ids) for choices in client.results.values() for _, one in sorted(choices.items())]


def chances() -> dict[tuple[int, ...], float]:
    """Return the chance of every text, from the model's logits behind every beginning of one."""
    found = {}
    for text in product(TOKENS, repeat=LENGTH):
        model, chance = tiny(), 1.0
        state = model.new_state()
        span = Span(state, np.array(IDS), min(len(IDS), model.config.window), is_replay=True)
        for token in text:
            logits = model.forward([span]).logits[-1][list(TOKENS)].double() / SAMPLING["temperature"]
            chance *= float(torch.softmax(logits, 0)[TOKENS.index(token)])
            span = Span(state, np.array([token]), 1)
        found[text] = chance
    return found


def distance(texts: list[tuple[int, ...]]) -> float:
    """Return the chi-square statistic of texts against `chances`."""
    expected, counts, total = chances(), Counter(texts), len(texts)
    assert set(counts) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1.0)
    return sum((counts[text] - total * share) ** 2 / (total * share) for text, share in expected.items())


@pytest.mark.parametrize("count", [192, pytest.param(4096, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "looked up"])
def test_block_verification_has_the_distribution_without_drafts(is_drawn: bool, count: int) -> None:
    engine = core(drafter=Opinionated(is_drawn=is_drawn), **OPTIONS)
    texts = answers(engine, count, acceptance="block")
    assert len(texts) == count
    assert engine.totals.accepted_tokens > 0.2 * engine.totals.drafted_tokens > 0
    assert distance(texts) < CHI_SQUARE_26


def test_a_seed_alone_is_keyed_and_fixes_the_answer_whatever_is_guessed() -> None:
    plain = answers(core(**OPTIONS), 96)
    assert answers(core(drafter=Opinionated(is_drawn=True), **OPTIONS), 96) == plain
    block = answers(core(drafter=Opinionated(is_drawn=True), **OPTIONS), 96, acceptance="block")
    assert sum(one != other for one, other in zip(block, plain, strict=True)) > 10
