"""The exact rules from seeds to tokens: guesses drawn by a `Choice`, judged round after round with keyed numbers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.drafting.acceptance import Rule, accept
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.structure import useful_rows
from headrace.engine.sampling.noise import Purpose, exponential_noise, uniform_draws
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import next_weights
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import compile_structured
from tests.engine.drafting.decoding import drafted, plain
from tests.engine.drafting.three_tokens import Chain, chi_square
from tests.engine.sampling.states import state_of
from tests.engine.sampling.vocabularies import setting

TARGET, DRAFT = Chain(21, 5), Chain(22, 5)
SEEDS = [pytest.param(500), pytest.param(10_000, marks=pytest.mark.full)]
WARM = SamplingParams(temperature=1.0, ignore_eos=True)


def logits(chain: Chain, text: tuple[int, ...]) -> Tensor:
    return chain.behind(torch.tensor([text], dtype=torch.int64).reshape(1, -1))[0].log().float()


def by_draft(text: tuple[int, ...], state: SamplerState) -> Proposal:
    choice, ids = Choice(state, is_drawn=True), list[int]()
    for _ in range(2):
        own = choice.pick(logits(DRAFT, (*text, *ids)))
        if own is None:
            break
        ids.append(own)
    return Proposal("chain", tuple(ids), choice.probabilities())


def texts(params: SamplingParams, rule: Rule, count: int) -> np.ndarray:
    found = []
    for seed in range(count):
        ids, _ = drafted(lambda text: logits(TARGET, text), (), state_of(params, seed=seed), 4, by_draft, rule)
        found.append(np.polyval(ids, 3))
    return np.bincount(np.array(found, dtype=np.int64), minlength=81)


@pytest.mark.parametrize("count", SEEDS)
@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.REJECTION])
def test_answers_of_many_seeds_follow_the_model(rule: Rule, count: int) -> None:
    """Four tokens take two rounds or more: numbers of one round must not come again in the next."""
    statistic, limit = chi_square(texts(WARM, rule, count), TARGET.joint(4))
    assert statistic < limit


@pytest.mark.parametrize("count", SEEDS)
def test_answers_of_many_seeds_follow_the_model_where_tokens_are_cut_and_penalised(count: int) -> None:
    params = SamplingParams(temperature=0.7, top_k=2, frequency_penalty=0.8, ignore_eos=True)
    expected = np.zeros(81)

    def spread(ids: tuple[int, ...], chance: float) -> None:
        if len(ids) == 4:
            expected[int(np.polyval(ids, 3))] = chance
            return
        weights = next_weights(logits(TARGET, ids), state_of(params, answer=ids))
        for token_id, share in enumerate((weights / weights.sum()).tolist()):
            spread((*ids, token_id), chance * share)

    spread((), 1.0)
    statistic, limit = chi_square(texts(params, Rule.BLOCK, count), expected)
    assert statistic < limit


def test_the_same_seed_gives_the_same_answer_and_no_guesses_the_plain_one() -> None:
    def model(text: tuple[int, ...]) -> Tensor:
        return logits(TARGET, text)

    for seed in range(30):
        state = state_of(WARM, seed=seed)
        both = [drafted(model, (), state, 4, by_draft, Rule.BLOCK) for _ in range(2)]
        assert both[0] == both[1]
        nothing = drafted(model, (), state, 4, lambda text, state: Proposal("none"), Rule.BLOCK)[0]
        assert nothing == plain(model, (), state, 4)


# ---------------------------------------------------------------------------------------------------- random numbers


def test_no_number_that_judges_a_guess_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of refused places are known to be large, so a later round that met them again would refuse too often."""
    used: list[float] = []

    def watched(*arguments: int) -> np.ndarray:
        drawn = uniform_draws(*arguments)
        used.extend(drawn)
        return drawn

    monkeypatch.setattr("headrace.engine.drafting.acceptance.uniform_draws", watched)
    for seed in range(40):
        drafted(lambda text: logits(TARGET, text), (), state_of(WARM, seed=seed), 4, by_draft, Rule.BLOCK)
    assert len(set(used)) == len(used) > 80


def test_numbers_of_different_purpose_index_position_and_seed_are_different() -> None:
    cases = [
        (seed, position, purpose, index)
        for seed in (0, 1, 2**63 - 1)
        for position in (0, 1, 7)
        for purpose in Purpose
        for index in range(4)
    ]
    drawn = [tuple(uniform_draws(8, *case)) for case in cases]
    assert len({number for one in drawn for number in one}) == 8 * len(cases)


def test_the_targets_noise_is_what_it_was_before_there_were_purposes() -> None:
    bits = np.random.Philox(key=np.array([5, 9], dtype=np.uint64)).random_raw(3)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
    assert exponential_noise(3, 5, 9).tolist() == torch.from_numpy(-np.log(uniform)).float().tolist()


# ------------------------------------------------------------------------------------------------- choices, proposals


def test_a_drawn_guess_comes_with_the_distribution_it_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, presence_penalty=1.0)
    state = state_of(params, seed=3)
    choice, picked = Choice(state, is_drawn=True), []
    rows = [torch.tensor([0.1, 0.9, 0.5, -1.0]), torch.tensor([0.4, 0.1, 0.3, 0.2])]
    for row in rows:
        picked.append(choice.pick(row))
    probabilities = choice.probabilities()
    for place, row in enumerate(rows):
        wanted = next_weights(row, state_of(params, answer=picked[:place]))
        assert torch.allclose(probabilities[place], wanted / wanted.sum())


def test_a_choice_stops_behind_the_end_of_the_answer_and_at_logits_that_are_none() -> None:
    for is_drawn in (False, True):
        choice = Choice(state_of(SamplingParams(temperature=1.0, stop_token_ids=[1])), is_drawn=is_drawn)
        assert choice.pick(torch.tensor([-50.0, 50.0])) == 1
        assert choice.has_ended
        assert choice.pick(torch.tensor([0.0, 0.0])) is None
        choice = Choice(state_of(WARM), is_drawn=is_drawn)
        assert choice.pick(torch.tensor([torch.nan, 0.0])) is None
        assert choice.probabilities() is None


def test_at_temperature_zero_a_choice_is_never_drawn() -> None:
    choice = Choice(state_of(), is_drawn=True)
    assert choice.pick(torch.tensor([0.0, 2.0, 1.0])) == 1
    assert choice.probabilities() is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"confidences": (0.5,)}, "2 guesses and 1 confidences"),
        ({"probabilities": torch.full((1, 3), 0.3)}, "2 guesses and probabilities"),
        ({"probabilities": torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])}, "cannot come"),
        ({"probabilities": torch.full((2, 3), torch.nan)}, "cannot come"),
    ],
)
def test_a_proposal_whose_parts_do_not_fit_is_an_error(parts: dict[str, object], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        Proposal("broken", (1, 2), **parts)


def test_a_cut_proposal_keeps_what_belongs_to_its_guesses() -> None:
    whole = Proposal("any", (1, 2, 0), torch.eye(3)[[1, 2, 0]], (0.1, 0.2, 0.3), match_tokens=4)
    cut = whole.cut(1)
    assert (cut.token_ids, cut.probabilities.tolist(), cut.confidences) == ((1,), [[0, 1, 0]], (0.1,))
    assert (cut.match_tokens, cut.drafter, len(whole.cut(0)), whole.cut(9)) == (4, "any", 0, whole)


# ---------------------------------------------------------------------------------------------------------- structure


def structured_state() -> SamplerState:
    of = setting("synthetic")
    spec = Structured.regex("[0-9]{3}")
    params = SamplingParams(temperature=1.0, structured=spec)
    matcher = compile_structured(spec, of.vocabulary).start()
    return SamplerState(params, (), seed=1, eos_token_id=of.eos, vocab_size=of.vocabulary.size, matcher=matcher)


def test_guesses_that_break_the_structure_get_no_rows_and_stay_to_be_refused_where_they_were_drawn() -> None:
    state, vocab = structured_state(), setting("synthetic").vocabulary.size
    good, bad = ord("7"), ord("x")
    ids = (good, bad, good)
    proposal, rows = useful_rows(Proposal("lookup", ids), state)
    assert (proposal.token_ids, rows) == ((good,), 1)
    drawn = Proposal("drawn", ids, torch.full((3, vocab), 1 / vocab))
    proposal, rows = useful_rows(drawn, state)
    assert (proposal.token_ids, rows) == ((good, bad), 1)
    logits_RV = torch.zeros(rows + 1, vocab)
    for rule in (Rule.BLOCK, Rule.REJECTION):
        assert accept(rule, logits_RV, proposal, state).num_guessed <= 1
    assert useful_rows(Proposal("lookup", (good, good)), state)[1] == 2
    assert state.num_generated == 0


def test_a_guess_that_ends_the_answer_is_judged_without_a_row() -> None:
    state = state_of(SamplingParams(temperature=1.0, stop_token_ids=[3]))
    proposal, rows = useful_rows(Proposal("lookup", (1, 3, 2)), state)
    assert (proposal.token_ids, rows) == ((1, 3), 1)
