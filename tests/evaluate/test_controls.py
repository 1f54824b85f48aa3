"""The broken arms are broken where they say: far context, n-gram rows, pool and draft context really are gone."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from headrace.evaluate.drafting import accepted_rounds, count_accepted, write_greedily
from headrace.evaluate.pool import _random_blocks, judge_pool, restricted_layers
from headrace.evaluate.subject import PLAIN_CACHES, ScrambledAddressing
from headrace.evaluate.trial import Trial, judge_trials
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.draft import Drafter
from headrace.train.data.packing import next_token_labels
from headrace.train.graph import Document, TrainGraph
from tests.evaluate.subjects import SETTINGS, small_held_out, small_subject
from tests.train.graphs import token_ids


def logits(graph: TrainGraph, ids: np.ndarray) -> torch.Tensor:
    """Return the logits of a whole document as served."""
    with torch.no_grad():
        return graph.forward([Document(ids)], small_subject().options()).logits()


def test_window_only_cannot_see_past_its_windows_and_the_model_can() -> None:
    subject = small_subject()
    reach = subject.config.num_layers * (subject.config.window - 1) + 3  # and the look-back of the n-grams
    ids = token_ids(reach + 40, high=400)
    changed = np.concatenate([token_ids(20, 5, high=400), ids[20:]])
    rows = slice(20 + reach, None)
    denied = [logits(subject.window_only(), one)[rows] for one in (ids, changed)]
    assert len(denied[0]) >= 20
    assert torch.equal(*denied)
    seen = [logits(subject.graph(), one)[rows] for one in (ids, changed)]
    assert not torch.equal(*seen)
    assert all(value.any() for name, value in subject.masters.parameters.items() if "compressor.norm" in name)


def test_plain_caches_are_another_model_than_rounded_ones() -> None:
    subject = small_subject()
    trial = Trial(token_ids(60, high=400), next_token_labels(token_ids(60, high=400)), ((30, 59),))
    costs = [
        judge_trials(subject.graph(), options, [trial], ("full",))[0]["full"].nats
        for options in (subject.options(), subject.options(PLAIN_CACHES))
    ]
    assert not np.array_equal(*costs)
    assert abs(costs[0].mean() - costs[1].mean()) < 0.5


def test_zeroed_memory_is_a_memory_that_holds_nothing() -> None:
    subject, ids = small_subject(), token_ids(40, high=400)
    zeroed = logits(subject.without_ngrams(), ids)
    empty = {
        name: nn.Parameter(torch.zeros_like(value)) if name.endswith("engram.wkv.weight") else value
        for name, value in subject.masters.parameters.items()
    }
    graph = TrainGraph(replace(subject.masters, parameters=empty), subject.model.addressing)
    assert torch.equal(zeroed, logits(graph, ids))
    assert not torch.equal(zeroed, logits(subject.graph(), ids))


def test_scrambled_memory_makes_the_same_lookups_at_other_places() -> None:
    subject = small_subject()
    addressing = subject.model.addressing
    assert addressing is not None
    history = addressing.history(addressing.compress(np.arange(30, 90)), addressing.fresh())
    rows, dealt = addressing.row_ids(history), ScrambledAddressing(addressing, 4).row_ids(history)
    assert sorted(map(tuple, rows.reshape(60, -1).tolist())) == sorted(map(tuple, dealt.reshape(60, -1).tolist()))
    assert (rows.reshape(60, -1) != dealt.reshape(60, -1)).any(1).all()
    assert np.array_equal(dealt, ScrambledAddressing(addressing, 4).row_ids(history))
    ids = token_ids(40, high=400)
    assert not torch.equal(logits(subject.with_scrambled_ngrams(), ids), logits(subject.graph(), ids))


def test_random_blocks_are_different_visible_ones_and_as_many_as_were_kept() -> None:
    kept = torch.tensor([[0, 1, 2, 3], [2, 3, 9, -1], [-1, -1, -1, -1]])
    drawn = _random_blocks(kept, torch.tensor([4, 10, 3]), torch.Generator().manual_seed(1))
    assert torch.equal(drawn >= 0, kept >= 0)
    for row, limit in ((0, 4), (1, 10)):
        blocks = drawn[row][drawn[row] >= 0].tolist()
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < limit


def test_a_pool_of_a_random_model_keeps_a_share_and_a_random_one_its_part() -> None:
    subject = small_subject()
    assert restricted_layers(subject.graph()) == [5]
    found = judge_pool(subject, small_held_out(), SETTINGS, lambda _line: None)
    assert found is not None
    assert {(cell.kind, cell.tokens) for cell in found.cells} == {
        (kind, tokens) for kind in ("text", "pairs") for tokens in SETTINGS.lengths
    }
    for cell in found.cells:
        assert cell.share == 12 / cell.tokens
        assert cell.recall is not None
        assert cell.mass is not None
        assert 0 < cell.recall < 1
        assert 0 < (cell.picked_mass or 0) < cell.mass < 1
    chance = np.mean([cell.share for cell in found.cells])
    assert abs((found.random_recall.value or 0) - chance) < 0.3 * chance


def test_rounds_are_those_of_drafting_token_by_token() -> None:
    """A plain speculative loop: draft, let the model check every token, take what it agrees with and its own next."""
    subject, block = small_subject(), 3
    model = subject.model
    drafter = Drafter(subject.config, model.parameters, model.frequencies.plain)
    prompt = token_ids(40, 8, high=250)
    written = write_greedily(model, prompt, 24)
    state = model.new_state()
    output = model.forward([Span(state, prompt, 8, is_replay=True)], wants_taps=True)
    for ring in state.draft_rings:
        ring.restart(32)
    drafter.observe(state, 32, output.taps)
    token, rounds, tokens = int(output.logits[-1].argmax()), [], [*prompt.tolist()]
    while len(tokens) + block < len(written.token_ids):
        position, drafts, accepted = len(tokens) - 1, drafter.propose(state, token).ids.tolist(), 0
        while True:
            tokens.append(token)
            output = model.forward([Span(state, np.array([token]), 1)], wants_taps=True)
            drafter.observe(state, len(tokens) - 1, output.taps)
            token = int(output.logits[-1].argmax())
            if accepted == block or drafts[accepted] != token:
                break
            accepted += 1
        rounds.append((position, accepted))
    assert accepted_rounds(model, drafter, written)[: len(rounds)] == rounds
    assert len(rounds) > 2


def test_drafts_that_are_what_the_model_writes_are_all_accepted() -> None:
    subject = small_subject()
    model = subject.model
    drafter = Drafter(subject.config, model.parameters, model.frequencies.plain)
    written, other = (write_greedily(model, token_ids(40, seed, high=250), 12) for seed in (1, 2))
    start = 45
    state = model.new_state()
    for ring in state.draft_rings:
        ring.restart(start + 1 - 8)
    drafter.observe(state, start + 1 - 8, written.taps[start + 1 - 8 - written.first : start + 1 - written.first])
    drafts = drafter.propose(state, int(written.token_ids[start + 1])).ids.numpy()
    for agreed in range(4):
        ids = written.token_ids.copy()
        ids[start + 2 : start + 2 + agreed] = drafts[:agreed]
        ids[start + 2 + agreed : start + 5] = (drafts[agreed:] + 1) % 400
        assert count_accepted(model, drafter, replace(written, token_ids=ids), start, written) == agreed
    ids[start + 2 : start + 5] = drafts
    assert count_accepted(model, drafter, replace(written, token_ids=ids), start, other) < 3
