"""The model on pooled states: batches, hits, forks and swaps give the bits of a plain run with buffers of its own."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.cache.block_table import BlockTable
from headrace.cache.handover import begin_from, fork, publish
from headrace.cache.prefix_match import Reason
from headrace.cache.sequence_state import SequenceState
from headrace.cache.swap import swap_bytes, swap_in, swap_out
from headrace.models.deepseek_v41.batch import Span, Work
from headrace.models.deepseek_v41.model import DeepseekV41
from tests.cache.pages import Pages, chain_of, compressed, decode, prompt_spans, publish_prompt, read_prompt
from tests.traces import same_bits, synthetic

SHAPES = ("three streams", "pairs in the decoder")
MATCHES = (0, 1, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385)
STEPS = 4


def tiny(shape: str = SHAPES[0]) -> DeepseekV41:
    return synthetic(shape).model


def prompt(count: int, seed: int = 0, shape: str = SHAPES[0]) -> np.ndarray:
    return synthetic(shape).ids(count, seed)


def with_suffix(matched: int, suffix: int, shape: str = SHAPES[0]) -> np.ndarray:
    """A prompt that begins as `prompt` does for exactly `matched` tokens."""
    ids = prompt(matched + suffix, seed=0, shape=shape).copy()
    ids[:matched] = prompt(420, shape=shape)[:matched]
    if suffix:
        ids[matched:] = prompt(suffix, seed=matched + 1, shape=shape)
        ids[matched] = (prompt(420, shape=shape)[matched] + 1) % 256
    return ids


@cache
def plain(ids: tuple[int, ...], shape: str = SHAPES[0], steps: int = STEPS) -> tuple[list[Tensor], str, SequenceState]:
    """Logits, checksum and state of a run with buffers of its own, alone and in one chunk."""
    model = tiny(shape)
    state = model.new_state()
    logits = decode(model, state, read_prompt(model, state, np.array(ids)), steps)
    return logits, state.checksum(), state


def check_equals_plain(ids: np.ndarray, logits: list[Tensor], state: SequenceState, shape: str = SHAPES[0]) -> None:
    expected, checksum, _ = plain(tuple(ids.tolist()), shape, len(logits) - 1)
    assert all(same_bits(a, b) for a, b in zip(logits, expected, strict=True))
    assert state.checksum() == checksum


# -------------------------------------------------------------------------------------------------------- in batches


@pytest.mark.parametrize("shape", SHAPES)
def test_interleaved_batches_on_pools_are_the_plain_runs(shape: str) -> None:
    model, pages = tiny(shape), Pages(tiny(shape), is_scattered=True)
    prompts = [prompt(count, seed, shape) for seed, count in enumerate((130, 33, 257))]
    states = [pages.new() for _ in prompts]
    spans = [prompt_spans(model, state, ids, 64) for state, ids in zip(states, prompts, strict=True)]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(len(one) <= STEPS for one in logits):
        batch = []
        for place, state in enumerate(states):
            span = next(spans[place], None)
            if span is None and len(logits[place]) <= STEPS:
                span = Span(state, logits[place][-1].argmax().view(1).numpy(), 1)
            if span is not None:
                pages.make_room(state, state.length + span.num_rows)
                batch.append((place, span))
        run = model.forward([span for _, span in batch]).logits
        rows = iter(run)
        for place, span in batch:
            if span.decoder_rows:
                logits[place].append(next(rows))
    for ids, one, state in zip(prompts, logits, states, strict=True):
        check_equals_plain(ids, one, state, shape)
    pages.audit(a=states[0], b=states[1], c=states[2])


def test_a_slot_and_blocks_of_an_earlier_sequence_change_nothing() -> None:
    pages = Pages(tiny(), num_blocks=3, num_slots=1)
    for count in (300, 140, 5):
        state, ids = pages.new(), prompt(count, count)
        check_equals_plain(ids, decode(tiny(), state, read_prompt(tiny(), state, ids, pages), STEPS, pages), state)
        pages.drop(state)
        pages.audit()


# -------------------------------------------------------------------------------------------------------------- hits


@cache
def cached(shape: str) -> Pages:
    """Pages whose index has 420 tokens, with snapshots at chunk ends of 32 and at the end, and no running sequence."""
    model, pages = tiny(shape), Pages(tiny(shape))
    ids, state = prompt(420, shape=shape), pages.new()
    for span in prompt_spans(model, state, ids, 8):
        pages.make_room(state, state.length + span.num_rows)
        model.forward([span])
        publish(state, chain_of(ids), pages.index, is_interior=state.length < 420)
    pages.drop(state)
    pages.audit()
    return pages


@pytest.mark.parametrize(("shape", "suffix"), [*((SHAPES[0], count) for count in (1, 3, 9, 34)), (SHAPES[1], 3)])
@pytest.mark.parametrize("matched", MATCHES)
def test_an_exact_resume_is_the_plain_run(shape: str, matched: int, suffix: int) -> None:
    model, pages = tiny(shape), cached(shape)
    ids = with_suffix(matched, suffix, shape)
    state, match = pages.begin(chain_of(ids))
    window = model.config.window
    assert match.is_hit == (matched > 1)
    if match.is_hit:
        wanted = min(matched, len(ids) - window) // 2 * 2
        assert (match.num_tokens, match.row) == (matched, wanted)
        assert match.reason_text == f"diverges at token {matched}"
    work, logits = Work(), torch.empty(0)
    for span in prompt_spans(model, state, ids, 512):
        pages.make_room(state, state.length + span.num_rows)
        logits = model.forward([span], work=work).logits[-1]
    encoder = len(ids) - match.row
    assert work.producer_rows == encoder - min(window, len(ids))
    check_equals_plain(ids, decode(model, state, logits, STEPS, pages), state, shape)
    pages.drop(state)
    pages.audit()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_chunks_after_a_hit_change_nothing(chunk: int) -> None:
    pages, ids = cached(SHAPES[0]), with_suffix(257, 90)
    state, _ = pages.begin(chain_of(ids))
    check_equals_plain(ids, decode(tiny(), state, read_prompt(tiny(), state, ids, pages, chunk), STEPS, pages), state)
    pages.drop(state)


def test_a_hit_reads_blocks_and_writes_none_that_others_read() -> None:
    pages, ids = cached(SHAPES[0]), with_suffix(257, 3)
    before = pages.pool.read_blocks(pages.index.block_ids)
    state, match = pages.begin(chain_of(ids))
    assert state.table.block_ids[:2] == match.block_ids
    assert (match.partial_tokens, match.row) == (1, 252)  # tokens of a shared block are encoded again
    read_prompt(tiny(), state, ids, pages)
    assert torch.equal(pages.pool.read_blocks(pages.index.block_ids), before)
    pages.drop(state)


def test_two_readers_of_one_partial_block_go_their_own_ways() -> None:
    pages = cached(SHAPES[0])
    both = [with_suffix(300, 21), with_suffix(300, 40)]
    states = [pages.begin(chain_of(ids))[0] for ids in both]
    for ids, state in zip(both, states, strict=True):
        check_equals_plain(ids, decode(tiny(), state, read_prompt(tiny(), state, ids, pages), STEPS, pages), state)
    pages.audit(a=states[0], b=states[1])
    for state in states:
        pages.drop(state)


@pytest.mark.parametrize("count", [9, 127, 128, 129, 257])
def test_the_whole_prompt_can_be_a_hit(count: int) -> None:
    pages, ids = Pages(tiny()), prompt(count, 7)
    state = pages.new()
    read_prompt(tiny(), state, ids, pages, 32)
    publish_prompt(pages, state, ids)
    # from a sequence that still runs: its last block goes on growing while others read from it
    again, match = pages.begin(chain_of(ids))
    row = (count - tiny().config.window) // 2 * 2
    # the snapshot holds twice the window, so it reaches back one window and one token
    assert (match.num_tokens, match.row, match.reason) == ((count, row, None) if row else (0, 0, Reason.WITHIN_WINDOW))
    logits = read_prompt(tiny(), again, ids, pages)
    check_equals_plain(ids, decode(tiny(), again, logits, STEPS, pages), again)
    check_equals_plain(ids, decode(tiny(), state, logits, STEPS, pages), state)
    pages.audit(a=state, b=again)


def test_a_second_turn_begins_where_the_first_one_ended() -> None:
    pages, ids = Pages(tiny()), prompt(150, 3)
    state = pages.new()
    logits = decode(tiny(), state, read_prompt(tiny(), state, ids, pages), 30, pages)
    said = np.array([int(one.argmax()) for one in logits[:-1]])
    publish_prompt(pages, state, np.concatenate([ids, said]))
    pages.drop(state)
    longer = np.concatenate([ids, said, prompt(33, 4)])
    again, match = pages.begin(chain_of(longer))
    assert (match.num_tokens, match.row) == (180, 180)
    check_equals_plain(longer, decode(tiny(), again, read_prompt(tiny(), again, longer, pages), STEPS, pages), again)


def test_without_a_window_at_the_place_an_earlier_one_serves() -> None:
    pages, ids = Pages(tiny()), prompt(200, 3)
    state = pages.new()
    for span in prompt_spans(tiny(), state, ids, 50):
        pages.make_room(state, 200)
        tiny().forward([span])
        publish(state, chain_of(ids), pages.index, has_snapshot=state.length == 100)
    other = np.concatenate([ids[:170], prompt(41, 9)])
    again, match = pages.begin(chain_of(other))
    assert (match.num_tokens, match.row, match.recomputed) == (170, 100, 70)
    assert match.reason_text == "window state only at token 100"
    check_equals_plain(other, decode(tiny(), again, read_prompt(tiny(), again, other, pages), STEPS, pages), again)


def test_full_runs_leave_the_same_blocks_and_snapshots_as_replayed_ones() -> None:
    model, pages, ids = tiny(), Pages(tiny()), prompt(140, 3)
    state = pages.new()
    pages.make_room(state, 140)
    model.forward([Span(state, ids, 140)])
    publish_prompt(pages, state, ids)
    longer = np.concatenate([ids, prompt(20, 1)])
    again, match = pages.begin(chain_of(longer))
    assert match.num_tokens == 140
    check_equals_plain(longer, decode(model, again, read_prompt(model, again, longer, pages), STEPS, pages), again)


# ------------------------------------------------------------------------------------------------ approximate resumes


def test_a_replayed_resume_is_bounded_reads_entries_and_differs() -> None:
    model, pages, ids = tiny(), Pages(tiny()), prompt(257, 3)
    state = pages.new()
    read_prompt(model, state, ids, pages)
    publish_prompt(pages, state, ids, has_snapshot=False)
    pages.drop(state)
    longer = np.concatenate([ids, prompt(33, 1)])
    assert pages.index.match(chain_of(longer)).reason is Reason.NO_WINDOW
    before = pages.pool.read_blocks(pages.index.block_ids)
    first, match = pages.begin(chain_of(longer), can_replay=True)
    assert (match.is_approximate, match.num_tokens, match.row) == (True, 257, 257 - 8 - 1)
    logits = decode(model, first, read_prompt(model, first, longer, pages), STEPS, pages)
    assert torch.equal(pages.pool.read_blocks(pages.index.block_ids), before)
    assert first.encoder_floor == match.row
    expected, checksum, exact = plain(tuple(longer.tolist()))
    assert first.checksum() != checksum
    assert not all(same_bits(a, b) for a, b in zip(logits, expected, strict=True))
    # what was found is exact; what follows it is not
    for layer_id, store in first.stores.items():
        mine, theirs = store.stored_rows()[0], exact.stores[layer_id].stored_rows()[0]
        assert torch.equal(mine[: 256 // store.ratio], theirs[: 256 // store.ratio])
    # it is a function of the tokens and the match: chunks and neighbours change nothing
    second, _ = pages.begin(chain_of(longer), can_replay=True)
    again = decode(model, second, read_prompt(model, second, longer, pages, 5), STEPS, pages)
    assert all(same_bits(a, b) for a, b in zip(logits, again, strict=True))
    assert first.checksum() == second.checksum()


# --------------------------------------------------------------------------------------------------- forks and swaps


@pytest.mark.parametrize("count", [1, 127, 128, 129, 256])
def test_forks_are_the_plain_runs(count: int) -> None:
    model, pages, ids = tiny(), Pages(tiny()), prompt(count, 5)
    state = pages.new()
    logits = read_prompt(model, state, ids, pages)
    child = fork(state, pages.slots.acquire())
    assert child.table.block_ids[: count // 128] == state.table.block_ids[: count // 128]
    assert not set(child.table.block_ids[count // 128 :]) & set(state.table.block_ids)
    assert child.checksum() == state.checksum()
    other = (int(logits.argmax()) + 1) % 256
    pages.make_room(child, count + 1)
    stray = model.forward([Span(child, np.array([other]), 1)]).logits[-1]
    check_equals_plain(ids, decode(model, state, logits, STEPS, pages), state)
    own = model.new_state()
    read_prompt(model, own, ids)
    assert same_bits(model.forward([Span(own, np.array([other]), 1)]).logits[-1], stray)
    assert child.checksum() == own.checksum()
    pages.audit(a=state, b=child)


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("count", [1, 127, 128, 257])
def test_swapped_states_go_on_as_if_they_had_stayed(count: int, is_indexed: bool) -> None:
    model, pages, ids = tiny(), Pages(tiny(), num_blocks=8), prompt(count, 6)
    state = pages.new()
    logits = read_prompt(model, state, ids, pages)
    if is_indexed:
        publish_prompt(pages, state, ids)
    seen = [logits]
    for _ in range(2):
        expected, checksum = swap_bytes(state, pages.index.held), state.checksum()
        swapped = swap_out(state, pages.index.held)
        assert swapped.nbytes == expected
        pages.slots.release(state.slot)
        pages.audit()
        pages.index.evict(8)
        assert pages.pool.num_free == 8
        filler = pages.new()
        read_prompt(model, filler, prompt(257, 1), pages)
        state = swap_in(swapped, pages.slots.acquire(), BlockTable(pages.pool))
        assert state.checksum() == checksum
        pages.audit(a=state, b=filler)
        pages.drop(filler)
        seen = seen[:-1] + decode(model, state, seen[-1], 2, pages)
    check_equals_plain(ids, seen, state)


def test_a_swap_in_the_middle_of_a_prompt_and_of_a_resume_changes_nothing() -> None:
    model, pages, ids = tiny(), cached(SHAPES[0]), with_suffix(300, 100)
    state, match = pages.begin(chain_of(ids))
    spans = prompt_spans(model, state, ids, 3)
    for _ in range(4):
        span = next(spans)
        pages.make_room(state, state.length + 3)
        model.forward([span])
    swapped = swap_out(state, pages.index.held)
    assert swapped.num_blocks == 3
    pages.slots.release(state.slot)
    state = swap_in(swapped, pages.slots.acquire(), BlockTable(pages.pool))
    assert state.table.write_floor == match.num_tokens
    check_equals_plain(ids, decode(model, state, read_prompt(model, state, ids, pages), STEPS, pages), state)
    pages.drop(state)


def test_blocks_that_another_sequence_reads_stay_when_one_is_swapped() -> None:
    model, pages, ids = tiny(), Pages(tiny()), prompt(300, 6)
    state = pages.new()
    logits = read_prompt(model, state, ids, pages)
    child = fork(state, pages.slots.acquire())
    swapped = swap_out(state)
    pages.slots.release(state.slot)
    assert (swapped.num_blocks, sorted(swapped.kept)) == (1, [0, 1])
    pages.drop(child)
    state = swap_in(swapped, pages.slots.acquire(), BlockTable(pages.pool))
    check_equals_plain(ids, decode(model, state, logits, STEPS, pages), state)
    pages.audit(a=state)


# ---------------------------------------------------------------------------------------------------------- rollbacks


def test_rejected_tokens_leave_no_trace_on_pools() -> None:
    model, pages, ids = tiny(), Pages(tiny()), prompt(125, 5)
    state = pages.new()
    logits = read_prompt(model, state, ids, pages)
    pages.make_room(state, 140)
    model.forward([Span(state, prompt(7, 9), 7)])
    state.rollback(125)
    check_equals_plain(ids, decode(model, state, logits, STEPS, pages), state)


def test_a_begun_state_needs_the_look_back_of_its_place() -> None:
    """The ids before the place matter: with others the n-gram rows differ, and the bits with them."""
    pages, ids = cached(SHAPES[0]), with_suffix(130, 9)
    state, match = pages.new(), pages.index.match(chain_of(ids))
    begin_from(match, state, pages.index, compressed(tiny(), ids[1 : match.row]))
    wrong = pages.new()
    match = pages.index.match(chain_of(ids))
    begin_from(match, wrong, pages.index, compressed(tiny(), np.flip(ids[: match.row])))
    logits = read_prompt(tiny(), state, ids, pages)
    assert not same_bits(read_prompt(tiny(), wrong, ids, pages), logits)
    check_equals_plain(ids, [logits], state)
    pages.drop(state)
    pages.drop(wrong)


def test_shapes_for_pools_are_those_of_new_states() -> None:
    shape = tiny().state_shape
    assert shape == tiny().new_state().shape
    assert replace(shape, lookback=0) != shape
