"""Greedy and keyed acceptance: the answer without drafting, token for token, whatever the drafter says."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.drafting.acceptance import Accepted, Rule, accept, rule_for
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import RowError, sample
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import compile_structured
from tests.engine.drafting.decoding import Guesser, drafted, logits_of, outcome, plain
from tests.engine.sampling.states import state_of
from tests.engine.sampling.vocabularies import setting

VOCAB = 24
COUNT = 24


def small(text: tuple[int, ...]) -> Tensor:
    return logits_of(text, VOCAB)


@st.composite
def requests(draw: st.DrawFn) -> SamplingParams:
    """Everything that changes which token comes."""
    has_min = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([None, 1, 3, 10])),
        top_p=draw(st.sampled_from([1.0, 0.4, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        logit_bias=draw(st.sampled_from([{}, {3: 2.0, 5: -50.0}])),
        stop_token_ids=draw(st.sampled_from([[], [7, 11]])),
        min_tokens=5 if has_min else 0,
        max_tokens=COUNT,
    )


def mixed(seed: int, quality: float) -> Guesser:
    """Guess what the sampler will take, spoiled here and there, up to five tokens; sometimes nothing."""
    numbers = random.Random(seed)

    def guess(text: tuple[int, ...], state: SamplerState) -> Proposal:
        choice, ids = Choice(state), list[int]()
        for _ in range(numbers.randrange(6)):
            own = choice.pick(small((*text, *ids)))
            if own is None:
                break
            ids.append(own if numbers.random() < quality else numbers.randrange(VOCAB))
        return Proposal("mixed", tuple(ids))

    return guess


@given(
    params=requests(),
    seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
    quality=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    draws=st.integers(0, 2**16),
)
def test_an_answer_is_the_one_without_drafting(
    params: SamplingParams, seed: int, prompt: tuple[int, ...], quality: float, draws: int
) -> None:
    state = state_of(params, prompt=prompt, seed=seed, eos=VOCAB - 1)
    own = plain(small, prompt, state, COUNT)
    found, rounds = drafted(small, prompt, state, COUNT, mixed(draws, quality))
    assert found == own
    if quality == 1:
        assert all(kept == guessed for guessed, kept in rounds)


def test_the_check_sees_guesses_that_are_taken_unseen() -> None:
    """The comparison above fails for a rule that keeps what it should not: here, what another seed samples."""
    params, prompt = SamplingParams(temperature=1.0), (1, 2, 3)
    state, other = (state_of(params, prompt=prompt, seed=seed, eos=VOCAB - 1) for seed in (1, 2))
    assert drafted(small, prompt, other, COUNT, mixed(0, 1.0))[0] != plain(small, prompt, state, COUNT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_of_every_length_is_kept_and_followed_by_the_models_own_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    prompt, state = (4, 2), state_of(params, prompt=(4, 2), seed=3)
    own = plain(small, prompt, state, 6)
    for kept in range(6):
        wrong = tuple((token_id + 1) % VOCAB for token_id in own[kept:5])
        guesses = (*own[:kept], *wrong)
        rows = torch.stack([small((*prompt, *guesses[:n])) for n in range(6)])
        accepted = accept(Rule.KEYED, rows, Proposal("forced", guesses), state)
        assert accepted == Accepted(tuple(own[: kept + 1]), kept)


def test_judging_changes_neither_state_nor_logits() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    state = state_of(params, prompt=(1, 2), answer=(3,), seed=5)
    rows = torch.stack([small((n, 2 * n)) for n in range(4)])
    before, proposal = rows.clone(), Proposal("any", (1, 2, 3))
    results = [accept(rule, rows, proposal, state) for rule in (*Rule, *Rule)]
    assert results[:3] == results[3:]
    assert rows.equal(before)
    assert (state.position, state.num_generated, state.generated.ids.tolist()) == (3, 1, [3])


def test_guesses_beyond_the_rows_are_not_kept_and_the_last_one_judged_needs_no_row_of_its_own() -> None:
    params, prompt = SamplingParams(temperature=1.0, ignore_eos=True), (4, 2)
    state = state_of(params, prompt=prompt, seed=3)
    own = tuple(plain(small, prompt, state, 5))
    rows = torch.stack([small((*prompt, *own[:n])) for n in range(2)])
    assert accept(Rule.KEYED, rows, Proposal("long", own), state) == Accepted(own[:2], 2)


def test_nothing_comes_behind_a_guess_that_ends_the_answer() -> None:
    params, prompt = SamplingParams(), (4, 2)
    free = state_of(SamplingParams(ignore_eos=True), prompt=prompt)
    own = tuple(plain(small, prompt, free, 5))
    place = 2
    for extra in (SamplingParams(stop_token_ids=[own[place]]), SamplingParams(stop_token_ids=[own[place]], top_k=5)):
        state = state_of(extra, prompt=prompt)
        rows = torch.stack([small((*prompt, *own[:n])) for n in range(6)])
        first = own.index(own[place])
        assert accept(Rule.KEYED, rows, Proposal("any", own), state).token_ids == own[: first + 1]
    assert params.temperature == 0


# --------------------------------------------------------------------------------------------------- rows that fail


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", list(Rule))
def test_a_row_that_has_no_token_fails_where_it_would_without_drafting(temperature: float, rule: Rule) -> None:
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    state, prompt = state_of(params, prompt=(4, 2), seed=3), (4, 2)
    own = tuple(plain(small, prompt, state, 4))
    rows = torch.stack([small((*prompt, *own[:n])) for n in range(5)])
    one_hot = torch.nn.functional.one_hot(torch.tensor(own), VOCAB).float()
    proposal = Proposal("right", own, one_hot if rule is not Rule.KEYED else None)
    rows[2] = torch.nan
    accepted = accept(rule, rows, proposal, state)
    # under the exact rules a right guess may be refused too; whatever happens ends before the row
    assert len(accepted.token_ids) <= 2
    if rule is Rule.KEYED or temperature == 0:
        assert accepted == Accepted(own[:2], 2)
    rows[0] = torch.nan
    with pytest.raises(RowError, match="row 0"):
        accept(rule, rows, proposal, state)


def test_a_bad_row_behind_a_wrong_guess_does_not_matter() -> None:
    prompt, params = (4, 2), SamplingParams()
    state = state_of(params, prompt=prompt)
    rows = torch.stack([small(prompt), torch.full((VOCAB,), torch.nan)])
    own = sample(rows[0], state)
    wrong = Proposal("wrong", ((own + 1) % VOCAB,))
    assert accept(Rule.KEYED, rows, wrong, state) == Accepted((own,), 0)


def test_rows_that_are_none_are_an_error() -> None:
    with pytest.raises(InternalError, match=r"\[R, V\]"):
        accept(Rule.KEYED, torch.zeros(0, VOCAB), Proposal("any"), state_of())


# ------------------------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_structured_answer_is_the_one_without_drafting(temperature: float) -> None:
    of = setting("synthetic")
    spec = Structured.regex("(ab|cd){2,6}!?")
    params = SamplingParams(temperature=temperature, structured=spec)
    vocab = of.vocabulary.size

    def model(text: tuple[int, ...]) -> Tensor:
        return logits_of(text, vocab)

    compiled, numbers, total = compile_structured(spec, of.vocabulary), random.Random(0), 0
    for seed in range(12):
        state = SamplerState(params, (5,), seed=seed, eos_token_id=of.eos, vocab_size=vocab, matcher=compiled.start())

        def guess(text: tuple[int, ...], state: SamplerState) -> Proposal:
            choice, ids = Choice(state), list[int]()
            while len(ids) < 4 and (own := choice.pick(model((*text, *ids)))) is not None:
                ids.append(own if numbers.random() < 0.8 else numbers.randrange(vocab))
            return Proposal("mixed", tuple(ids))

        own = outcome(lambda: plain(model, (5,), state, 20))  # noqa: B023
        found, rounds = drafted(model, (5,), state, 20, guess)
        assert found == own
        total += sum(kept for _, kept in rounds)
    assert total > 20


# ------------------------------------------------------------------------------------------------------------ rules


def test_a_seed_or_temperature_zero_asks_for_the_keyed_rule() -> None:
    assert rule_for(SamplingParams(temperature=1.0, seed=4)) is Rule.KEYED
    assert rule_for(SamplingParams(temperature=1.0)) is Rule.KEYED
    assert rule_for(SamplingParams(temperature=0.0, acceptance="block")) is Rule.KEYED
    assert rule_for(SamplingParams(temperature=1.0, acceptance="block")) is Rule.BLOCK
    assert rule_for(SamplingParams(temperature=1.0, seed=4, acceptance="block")) is Rule.BLOCK
