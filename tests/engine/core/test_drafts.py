"""Guesses change how fast an answer comes and nothing else, however many of them are right."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headrace.engine.core import drafts
from headrace.engine.core.core import EngineCore
from headrace.engine.core.draft_policy import DraftPolicy
from headrace.engine.core.dspark import DSpark
from headrace.engine.core.events import TokenEvent
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.temperatures import calibration_error
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41
from tests.engine.core.serving import GREEDY, SEEDED, Client, alone, answer, core, params, prompt, said
from tests.golden_mini import FOLDER

KINDS = pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])


class Scripted:
    """Knows the right answers and gets `right(round)` of `length` guesses right; checks what it is told."""

    name = "scripted"
    max_guesses = 5
    wants_taps = False

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: Sequence[int], length: int = 5) -> None:
        self.answers, self.right, self.length = answers, right, length
        self.heard: dict[str, list[int]] = {}
        self.rounds: dict[str, int] = {}

    def observe(self, committed: Sequence[Committed]) -> None:
        for one in committed:
            heard = self.heard.setdefault(one.name, [])
            assert one.first == len(heard)
            heard += one.token_ids.tolist()

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        return [self._one(one) for one in wanted]

    def _one(self, wanted: Wanted) -> Proposal:
        text = [*self.heard[wanted.name], wanted.token_id]
        whole = next([*given, *new] for given, new in self.answers.items() if [*given, *new][: len(text)] == text)
        number = self.rounds.get(wanted.name, 0)
        self.rounds[wanted.name] = number + 1
        count = self.right[number % len(self.right)]
        truth = whole[len(text) : len(text) + self.length]
        wrong = [(token + 1) % 250 for token in truth[count:]]
        return Proposal(self.name, (*truth[:count], *wrong)[: wanted.count])

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.heard.pop(name, None)


def truth(ids: Sequence[int], count: int, **sampling: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(ids): alone(tuple(ids), "replay", count, **sampling)[0]}


@KINDS
@pytest.mark.parametrize("right", [[0], [1], [2], [3], [4], [5], [0, 5, 2, 1, 4, 3]], ids=str)
@pytest.mark.parametrize("length", [64, 127])
def test_any_number_of_right_guesses_gives_the_plain_answer(length: int, right: list[int], kind: dict) -> None:
    ids, count = prompt(length, 3), 17
    drafter = Scripted(truth(ids, count, **kind), right)
    result = answer(core(drafter=drafter), ids, params(max_tokens=count, **kind))
    assert said(result) == alone(tuple(ids), "replay", count, **kind)
    assert result.work.draft_rounds > 0
    if right == [5]:
        assert result.work.drafts_accepted >= count * 4 // 6
    if right == [0]:
        assert result.work.drafts_accepted == 0


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("right", [0, 3, 5])
def test_the_state_after_guesses_is_that_of_decoding_one_by_one(count: int, right: int) -> None:
    ids = prompt(131, 5)
    drafted, plain = core(drafter=Scripted(truth(ids, 70), [right])), core()
    tokens = [one_step(engine, ids, count) for engine in (drafted, plain)]
    shared = min(map(len, tokens))
    assert tokens[0][:shared] == tokens[1][:shared]
    state = drafted._sequences["a/0"].state
    while plain._sequences["a/0"].state.length < state.length:
        plain.step()
    assert plain._sequences["a/0"].state.length == state.length
    assert plain._sequences["a/0"].state.checksum() == state.checksum()


def one_step(engine: EngineCore, ids: list[int], steps: int) -> list[int]:
    """Submit, and do steps until some have decoded; return the answer so far."""
    client = Client(engine)
    client.submit("a", ids, params(max_tokens=70))
    while not engine._sequences["a/0"].answer.token_ids:
        client.step()
    client.step(steps)
    return list(engine._sequences["a/0"].answer.token_ids)


def known(prompts: Sequence[list[int]], count: int, **kind: Any) -> dict[tuple[int, ...], list[int]]:
    answers: dict[tuple[int, ...], list[int]] = {}
    for ids in prompts:
        answers |= truth(ids, count, **kind)
    return answers


@KINDS
def test_several_answers_with_different_guesses_join_and_leave(kind: dict) -> None:
    prompts = [prompt(length, 10 + index) for index, length in enumerate([40, 127, 70, 129])]
    drafter = Scripted(known(prompts, 14, **kind), [0, 5, 1, 3, 2])
    client = Client(core(drafter=drafter))
    for index, ids in enumerate(prompts):
        client.submit(str(index), ids, params(max_tokens=14 - index, **kind))
        client.step(3)
    client.finish()
    for index, ids in enumerate(prompts):
        assert said(client.results[str(index)][0]) == alone(tuple(ids), "replay", 14 - index, **kind)
    client.core.step()
    assert drafter.heard == {}


@KINDS
@pytest.mark.parametrize("right", [[5], [2, 0, 4]], ids=str)
def test_an_answer_that_was_swapped_out_goes_on_with_its_guesses(kind: dict, right: list[int]) -> None:
    prompts = [prompt(115, 1), prompt(125, 2)]
    options = {"cache_tokens": 384, "max_context": 256, "host_bytes": 1 << 22, "headroom_blocks": 0, "num_slots": 2}
    client = Client(core(drafter=Scripted(known(prompts, 30, **kind), right), **options))
    for name, ids in zip("ab", prompts, strict=True):
        client.submit(name, ids, params(max_tokens=30, **kind))
    client.finish()
    assert client.results["b"][0].work.preemptions
    for name, ids in zip("ab", prompts, strict=True):
        assert said(client.results[name][0]) == alone(tuple(ids), "replay", 30, **kind)


def test_a_prefix_hit_and_further_answers_with_guesses() -> None:
    ids = prompt(200, 4)
    drafter = Scripted(truth(ids, 12), [4, 2])
    engine = core(drafter=drafter)
    first = answer(engine, ids, params(max_tokens=12))
    second = answer(engine, ids, params(max_tokens=12), name="two")
    assert second.usage.cached_tokens > 100
    assert said(first) == said(second) == alone(tuple(ids), "replay", 12)


def test_guesses_behind_the_end_of_an_answer_are_not_taken() -> None:
    ids = prompt(64, 3)
    tokens, _ = alone(tuple(ids), "replay", 12)
    stop = tokens[4]
    plain = answer(core(), ids, params(max_tokens=12, stop_token_ids=(stop,)))
    drafted = answer(core(drafter=Scripted(truth(ids, 12), [5])), ids, params(max_tokens=12, stop_token_ids=(stop,)))
    assert said(drafted) == said(plain)
    assert (drafted.finish_reason, drafted.stop) == ("stop", stop)


def test_penalties_move_along_with_accepted_guesses() -> None:
    ids, kind = prompt(90, 6), {"temperature": 0.7, "seed": 3, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    drafter = Scripted(truth(ids, 15, **kind), [5, 2])
    assert said(answer(core(drafter=drafter), ids, params(max_tokens=15, **kind))) == alone(
        tuple(ids), "replay", 15, **kind
    )


def test_the_trace_and_the_totals_count_guesses() -> None:
    ids = prompt(64, 3)
    engine = core(drafter=Scripted(truth(ids, 12), [2]))
    result = answer(engine, ids, params(max_tokens=12))
    steps = [step for trace in engine.traces.newest() for step in trace.requests if step.kind == "decode"]
    assert sum(step.drafts_proposed for step in steps) == result.work.drafts_proposed == engine.totals.drafted_tokens
    assert sum(step.drafts_accepted for step in steps) == result.work.drafts_accepted == engine.totals.accepted_tokens
    assert all(step.stop - step.start == 1 + step.drafts_proposed for step in steps)
    assert all(len(step.draft_ids) == len(step.draft_chances) == step.drafts_proposed for step in steps)
    assert all(1 >= first >= second > 0 for step in steps for first, second in pairwise(step.draft_chances))
    said_so = [token for step in steps for token in step.draft_ids[: step.drafts_accepted]]
    assert said_so
    assert set(said_so) <= set(result.token_ids)
    assert engine.totals.verify_lengths == Counter(step.drafts_proposed for step in steps)
    assert engine.totals.mean_accepted == pytest.approx(result.work.drafts_accepted / result.work.draft_rounds)
    predicted = np.array([chance for step in steps for chance in step.draft_chances])
    kept = np.array([place < step.drafts_accepted for step in steps for place in range(step.drafts_proposed)])
    assert engine.draft_status["draft_calibration_error"] == pytest.approx(calibration_error(predicted, kept))
    assert engine.draft_status["draft_calibration_guesses"] == len(kept)


def test_an_x_ray_shows_the_guesses_of_its_step_and_their_chances() -> None:
    ids = prompt(64, 3)
    client = Client(core(drafter=Scripted(truth(ids, 12), [2])))
    client.submit("a", ids, params(max_tokens=12, xray=True))
    events = []
    while not client.core.is_idle:
        events += [event for event in client.step() if isinstance(event, TokenEvent) and event.token_id is not None]
    traced = {trace.step: trace.requests for trace in client.core.traces.newest()}
    drafted = [event for event in events if event.is_draft]
    assert drafted
    for event in drafted:
        step = event.xray.request
        assert event.token_id in step.draft_ids
        assert step.drafts_made >= len(step.draft_ids) == len(step.draft_chances) > 0
        (found,) = [one for requests in traced.values() for one in requests if one.start == step.start]
        assert found == step
    assert {event.xray.draft_gain for event in events} == {None}  # nobody measures without a guard


def test_what_the_policy_cuts_off_is_told_too() -> None:
    ids = prompt(64, 3)
    engine = core(drafter=Scripted(truth(ids, 12), [2]))
    engine._drafting.policy.lengths = lambda proposals: [min(2, len(one)) for one in proposals]
    answer(engine, ids, params(max_tokens=12))
    steps = [step for trace in engine.traces.newest() for step in trace.requests if step.kind == "decode"]
    assert max(step.drafts_proposed for step in steps) == 2
    assert max(step.drafts_made for step in steps) == 5


# ------------------------------------------------------------------------------------------ the checkpoint's drafter


def golden() -> DeepseekV41:
    return load_model(FOLDER, LoadOptions(has_draft=True)).model


@KINDS
@pytest.mark.parametrize("chunk", [16, 512])
def test_the_draft_module_changes_no_answer(chunk: int, kind: dict) -> None:
    model = golden()
    ids = np.random.default_rng(2).integers(0, 250, 90).tolist()
    size = {"chunk": chunk, "max_context": 512}
    plain = answer(core(model, **size), ids, params(max_tokens=20, **kind))
    drafted = answer(core(model, drafter=DSpark(model, 250), **size), ids, params(max_tokens=20, **kind))
    assert said(drafted) == said(plain)
    assert drafted.work.drafts_proposed > 0


class Breaks(DraftPolicy):
    """Drafts in the first steps and the last ones, and says in between that it will not for long."""

    steps = 0

    def wants(self, rooms: Mapping[str, int]) -> bool:
        self.steps += bool(rooms)
        return bool(rooms) and not 3 <= self.steps <= 14

    @property
    def wait(self) -> float:
        return 1000.0 if 3 <= self.steps <= 12 else 0.0


@KINDS
def test_drafts_go_on_after_steps_that_gave_no_taps(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_MOST_SKIPS", 0)  # `Breaks` counts how often it is asked
    model = golden()
    ids = np.random.default_rng(2).integers(0, 250, 90).tolist()
    plain = answer(core(model, max_context=512), ids, params(max_tokens=40, **kind))
    engine = core(model, drafter=DSpark(model, 250), max_context=512)
    drafting = engine._drafting
    drafting.policy = Breaks(3)
    asked: list[bool] = []
    wants_taps = drafting.wants_taps
    drafting.wants_taps = lambda **said: asked.append(wants_taps(**said)) or asked[-1]
    assert said(answer(engine, ids, params(max_tokens=40, **kind))) == said(plain)
    assert asked[0]
    assert asked.count(False) == 10
    steps = [one for step in engine.traces.newest() for one in step.requests if one.kind == "decode"]
    proposed = [step.drafts_made for step in steps]
    assert [bool(count) for count in proposed[:14]] == [True, True, *[False] * 12]
    assert proposed[14:-3] == [3] * len(proposed[14:-3])
    assert len(proposed) > 20


class Sudden(Breaks):
    """Says for six steps that it will not draft for long, and then does."""

    def wants(self, rooms: Mapping[str, int]) -> bool:
        self.steps += bool(rooms)
        return bool(rooms) and self.steps > 6

    @property
    def wait(self) -> float:
        return 0.0 if self.steps > 6 else 1000.0


def test_taps_that_do_not_reach_the_newest_token_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_MOST_SKIPS", 0)
    model = golden()
    ids = np.random.default_rng(2).integers(0, 250, 90).tolist()
    engine = core(model, drafter=DSpark(model, 250), max_context=512)
    engine._drafting.policy = Sudden(3)
    answer(engine, ids, params(max_tokens=40))
    made = [one.drafts_made for step in engine.traces.newest() for one in step.requests if one.kind == "decode"]
    assert made[:7] == [0] * 7  # in the seventh there are those of the prompt alone, six tokens back
    assert made[7:10] == [3] * 3


def test_while_drafting_has_to_wait_most_steps_ask_nothing_and_the_guard_still_hears_of_all() -> None:
    model = golden()
    engine = core(model, drafter=DSpark(model, 250), max_context=512)
    policy = engine._drafting.policy = DraftPolicy(3)
    asked: list[int] = []
    wants = policy.wants
    policy.wants = lambda rooms: asked.extend(rooms.values()) or wants(rooms)
    ids = np.random.default_rng(2).integers(0, 250, 90).tolist()
    client = Client(engine)
    client.submit("a", ids, params(max_tokens=120))
    while len(engine._sequences["a/0"].answer.token_ids) < 34:
        client.step()
    assert asked == [119, 111, 103, 95, 87]
    client.submit("b", ids, params(max_tokens=3))  # whoever comes or goes is seen at once
    client.step(8)
    assert asked[-1] < 119 - 34
    assert set(policy._guard._ledgers) <= {"a/0", "b/0"}
    client.finish()
    assert engine._drafting._plain == []
    assert policy._guard._ledgers == {}


def test_the_draft_module_hears_what_it_would_hear_without_guesses() -> None:
    model = golden()
    ids = np.random.default_rng(2).integers(0, 250, 90).tolist()
    found = []
    for limit in (0, 5):
        drafter = DSpark(model, 250)
        drafter.max_guesses = limit or 1
        engine = core(model, drafter=drafter, max_context=512)
        client = Client(engine)
        client.submit("a", ids, params(max_tokens=40))
        while len(engine._sequences["a/0"].answer.token_ids) < 12:
            client.step()
        engine._drafting._tell([engine._sequences["a/0"]])
        state = engine._sequences["a/0"].state
        found.append((state.length, [ring.read(ring.end - 8, ring.end) for ring in state.draft_rings]))
    (length, rings), (longer, others) = found
    shift = longer - length
    for ring, other in zip(rings, others, strict=True):
        assert (ring[shift:] == other[: 8 - shift]).all()
