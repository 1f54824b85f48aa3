"""A thousand cancellations at every point of a request's life: everything comes back, and the engine still answers."""

import random
from collections import Counter

import pytest

from headrace.engine.core.core import EngineCore, choice_id
from headrace.engine.scheduler.entry import Phase
from tests.engine.core.serving import SEEDED, Client, alone, answer, core, params, prompt, said

PHASES = (Phase.QUEUED, Phase.FORKING, Phase.PREFILL, Phase.DECODE, Phase.SWAPPED)


class Traffic:
    """Random requests on a tight engine, some of which are cancelled in the phase that was cancelled least so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.client = Client(
            core(num_slots=4, cache_tokens=640, max_context=320, chunk=64, host_bytes=1 << 21, headroom_blocks=0)
        )
        self.live: dict[str, tuple[list[int], int, int]] = {}
        self.cancelled: Counter[Phase] = Counter()
        self.cancelled_names: set[str] = set()
        self.whole: dict[str, tuple[list[int], int]] = {}
        self.count = 0

    @property
    def engine(self) -> EngineCore:
        return self.client.core

    def submit(self) -> None:
        """Submit a request whose prompt may begin like another's."""
        pick = self.random
        shared = pick.choice([0, 0, 60, 128])
        ids = [*prompt(shared, 0), *prompt(pick.randint(121, 127) - shared % 128, pick.randint(1, 90))]
        tokens, further = pick.randint(9, 20), pick.choice([1, 1, 1, 2])
        name, self.count = f"r{self.count}", self.count + 1
        self.client.submit(name, ids, params(max_tokens=tokens, n=further, **SEEDED))
        self.live[name] = (ids, tokens, further)

    def cancel(self) -> None:
        """Cancel one live request in the rarest phase that there is, unless that was cancelled often enough by now."""
        phases: dict[Phase, list[str]] = {}
        for name in self.live:
            entry = self.engine._scheduler.entry(choice_id(name, 0))
            child = self.engine._scheduler.entry(choice_id(name, 1))
            for one in filter(None, (entry, child)):
                phases.setdefault(one.phase, []).append(name)
        _, place = min((self.cancelled[one], place) for place, one in enumerate(PHASES) if one in phases)
        phase = PHASES[place]
        if self.cancelled[phase] > 3 + min(self.cancelled[one] for one in PHASES):
            return
        name = self.random.choice(phases[phase])
        self.cancelled[phase] += 1
        self.cancelled_names.add(name)
        self.engine.cancel(name)

    def step(self) -> None:
        """Step, and note who has ended."""
        self.client.step()
        for name in [name for name in self.live if len(self.client.results.get(name, {})) == self.live[name][2]]:
            ids, tokens, _ = self.live.pop(name)
            if name not in self.cancelled_names:
                self.whole[name] = (ids, tokens)


def run(cancellations: int, seed: int) -> Traffic:
    traffic = Traffic(seed)
    while sum(traffic.cancelled.values()) < cancellations:
        while len(traffic.live) < 7:
            traffic.submit()
        for _ in range(traffic.random.randint(1, 3)):
            traffic.step()
        if traffic.live:
            traffic.cancel()
    traffic.client.finish()
    return traffic


def check(traffic: Traffic) -> None:
    client, engine = traffic.client, traffic.engine
    assert not client.errors
    assert set(client.results) == {f"r{index}" for index in range(traffic.count)}
    for name in traffic.cancelled_names:
        for result in client.results[name].values():
            assert result.finish_reason in {"cancelled", "length"}  # its last token may have come just before
    everything = engine.memory.num_blocks
    assert engine.free_blocks + engine.cached_blocks == everything
    assert engine.cached_blocks > 0
    assert set(engine.counts.values()) == {0}
    assert engine._holdings.slots.num_free == engine.options.num_slots
    assert engine._sequences == {}
    assert engine.cache.index.shelf.nbytes > 0
    engine.audit()
    engine.clear_cache()
    assert (engine.free_blocks, engine.cached_blocks, engine.cache.index.shelf.nbytes) == (everything, 0, 0)
    ids = prompt(200, seed=3)
    assert said(answer(engine, ids, params(), "afterwards")) == alone(tuple(ids))


def test_cancellations_in_every_phase_give_everything_back() -> None:
    traffic = run(120, seed=1)
    assert min(traffic.cancelled[phase] for phase in PHASES) >= 10
    check(traffic)
    for name, (ids, tokens) in list(traffic.whole.items())[:5]:
        assert said(traffic.client.results[name][0]) == alone(tuple(ids), count=tokens, **SEEDED)


@pytest.mark.full
def test_a_thousand_cancellations_give_everything_back() -> None:
    traffic = run(1000, seed=2)
    assert min(traffic.cancelled[phase] for phase in PHASES) >= 100
    check(traffic)
    for name, (ids, tokens) in list(traffic.whole.items())[:40]:
        assert said(traffic.client.results[name][0]) == alone(tuple(ids), count=tokens, **SEEDED)


def test_a_cancelled_answer_keeps_what_it_had() -> None:
    client, ids = Client(core()), prompt(30)
    client.submit("one", ids, params(max_tokens=50))
    client.step(5)
    client.core.cancel("one")
    client.core.cancel("nobody")
    client.finish()
    result = client.results["one"][0]
    assert result.finish_reason == "cancelled"
    count = len(result.token_ids)
    assert 0 < count < 50
    assert said(result) == alone(tuple(ids), count=count)
