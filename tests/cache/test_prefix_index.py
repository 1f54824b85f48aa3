"""The index against a dictionary of token strings; what goes first; what a miss says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache import snapshot_shelf
from headrace.cache.chain import Chain
from headrace.cache.prefix_match import Match, Reason
from headrace.cache.resume_rule import exact_row, replayed_row
from headrace.core.errors import InternalError
from tests.cache.world import BYTES, STEP, World, chain_of, snapshot

LIBRARY = [np.random.default_rng(seed).integers(0, 3, size) for seed, size in enumerate((1, 2, 9, 64, 127, 128, 131))]
ACTS = {"start": 3, "grow": 2, "publish": 2, "snapshot": 3, "finish": 1, "match": 2, "release": 1, "evict": 1}


def words(random: np.random.Generator) -> np.ndarray:
    """A few phrases of few: prompts share beginnings of all lengths, and diverge inside blocks and at their ends."""
    ids = np.concatenate([LIBRARY[place] for place in random.integers(3, 7, random.integers(1, 4))])
    length = random.choice([len(ids), random.integers(1, len(ids) + 1)])
    return np.concatenate([ids[:length], LIBRARY[random.integers(3)]])


def step(world: World, random: np.random.Generator) -> None:
    """Do something at random."""
    act, ids = random.choice([name for name in ACTS for _ in range(ACTS[name])]), words(random)
    one = world.running[random.integers(len(world.running))] if world.running else None
    if act == "start":
        world.start(ids)
    elif act == "match":
        world.matches.append(world.match(chain_of(ids)))
    elif act == "release" and world.matches:
        world.index.release(world.matches.pop(random.integers(len(world.matches))))
    elif act == "evict":
        world.evict(int(random.integers(6)))
    elif one is not None and act == "grow":
        world.grow(one, LIBRARY[random.integers(len(LIBRARY))])
    elif one is not None and act in {"publish", "snapshot"}:
        world.publish(one, has_snapshot=act == "snapshot")
    elif one is not None and act == "finish":
        world.publish(one, has_snapshot=bool(random.integers(2)))
        one.table.release()
        world.running.remove(one)
    world.forget_freed()


@given(st.integers(0, 1 << 32))
def test_the_index_agrees_with_a_dictionary_of_token_strings(seed: int) -> None:
    world, random = World(), np.random.default_rng(seed)
    for _ in range(40):
        step(world, random)
        world.check()
    for match in world.matches:
        world.index.release(match)
    for one in world.running:
        one.table.release()
    world.evict(100)
    assert (world.pool.num_free, world.index.shelf.nbytes) == (world.num_blocks, 0)
    assert not world.index._keyed


# ------------------------------------------------------------------------------------------------------------ eviction


def kept(world: World, *, ids: np.ndarray, has_snapshot: bool = False) -> tuple[int, ...]:
    """Let a sequence come and go; return its blocks."""
    world.start(ids)
    one = world.running.pop()
    world.publish(one, has_snapshot=has_snapshot)
    ids = one.table.block_ids
    one.table.release()
    return ids


def numbered(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count)


def test_the_last_blocks_of_what_was_used_least_recently_go_first() -> None:
    world = World()
    old, new = kept(world, ids=numbered(300, 1)), kept(world, ids=numbered(300, 2))
    assert world.index.evict(1) == [old[2]]
    world.index.release(world.index.match(chain_of(numbered(300, 1)), can_replay=True))  # used again
    assert world.index.evict(4) == [new[2], new[1], new[0], old[1]]


def test_what_a_reader_has_is_not_evicted() -> None:
    world = World()
    blocks = kept(world, ids=numbered(300, 1))
    match = world.index.match(chain_of(numbered(200, 1)), can_replay=True)
    assert match.all_blocks == blocks[:2]
    assert world.index.num_evictable == 1
    assert world.index.evict(9) == [blocks[2]]
    world.index.release(match)
    assert world.index.num_evictable == 2
    assert world.index.clear() == [blocks[1], blocks[0]]


def test_what_leads_to_a_block_in_use_goes_last_and_takes_that_block_out_of_the_index() -> None:
    world = World()
    blocks = kept(world, ids=numbered(300, 1))
    world.pool.retain(blocks[1:2])
    assert world.index.num_evictable == 2
    assert world.index.evict(1) == [blocks[2]]
    assert world.index.num_evictable == 1
    assert world.index.evict(9) == [blocks[0]]
    assert world.index.held(blocks[1]) == 0  # its owner keeps it
    assert world.pool.references(blocks[1]) == 1


def test_a_block_in_two_lineages_is_free_after_the_second() -> None:
    world = World()
    blocks = kept(world, ids=numbered(128, 1))
    world.index.insert(chain_of(numbered(128, 1), "approximate"), 128, blocks)
    assert world.index.held(blocks[0]) == 2
    assert world.index.num_evictable == 1
    assert world.index.evict(1) == [blocks[0]]
    assert world.index.held(blocks[0]) == 0


def test_the_same_tokens_twice_are_one_set_of_blocks() -> None:
    world = World()
    for _ in range(2):  # both started before either was published
        world.start(numbered(300, 1))
    first, second = world.running
    world.publish(first)
    world.publish(second)
    assert second.table.block_ids[:2] == first.table.block_ids[:2]
    assert second.table.block_ids[2] != first.table.block_ids[2]
    assert world.pool.num_free == world.num_blocks - 4
    world.check()


def test_a_block_that_may_change_is_not_taken_as_a_whole_one() -> None:
    world = World()
    (block_id,) = world.pool.allocate(1)
    with pytest.raises(InternalError, match=f"block {block_id} is not sealed"):
        world.index.insert(chain_of(numbered(128)), 128, [block_id])


# ----------------------------------------------------------------------------------------------------------- snapshots


def test_snapshots_inside_prompts_go_first_and_the_newest_stay() -> None:
    world = World(budget=3 * BYTES)
    ids = numbered(380)
    chain, blocks = chain_of(ids), world.pool.allocate(3)
    world.pool.seal(blocks)
    other = numbered(100, 3)
    (block,) = world.pool.allocate(1)
    assert world.index.insert(chain_of(other), 100, [block], snapshot(100)).has_snapshot
    for length, is_interior in ((100, True), (200, True), (300, True)):
        assert world.index.insert(chain, length, blocks, snapshot(length), is_interior=is_interior).has_snapshot
    assert [length for length in (100, 200, 300) if find(world, ids[:length])] == [200, 300]
    find(world, ids[:200])  # used again
    assert world.index.insert(chain, 380, blocks, snapshot(380)).has_snapshot
    assert [length for length in (200, 300, 380) if find(world, ids[:length])] == [200, 380]
    (third, fourth) = world.pool.allocate(2)
    assert world.index.insert(chain_of(numbered(100, 4)), 100, [third], snapshot(100)).has_snapshot
    refused = world.index.insert(chain_of(numbered(100, 5)), 100, [fourth], snapshot(100), is_interior=True)
    assert not refused.has_snapshot
    assert all(find(world, ids) for ids in (other, numbered(100, 4), ids))
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (3, 3 * BYTES)


def test_the_older_snapshot_of_a_conversation_goes_before_those_of_others() -> None:
    world = World(budget=2 * BYTES)
    ids, other = numbered(380), numbered(100, 3)
    chain, blocks = chain_of(ids), world.pool.allocate(3)
    (block,) = world.pool.allocate(1)
    world.pool.seal(blocks)
    assert world.index.insert(chain_of(other), 100, [block], snapshot(100)).has_snapshot
    for length in (200, 350, 380):  # the other one was used longest ago, and stays
        assert world.index.insert(chain, length, blocks, snapshot(length)).has_snapshot
    assert [length for length in (200, 350, 380) if find(world, ids[:length])] == [380]
    assert find(world, other)


def test_a_snapshot_that_nobody_used_for_its_time_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = World(budget=4 * BYTES), 1000.0
    monkeypatch.setattr(snapshot_shelf.time, "monotonic", lambda: now)
    world.index.shelf.ttl_s = 60
    chains = [chain_of(numbered(100, seed)) for seed in (1, 2)]
    for chain in chains:
        (block,) = world.pool.allocate(1)
        assert world.index.insert(chain, 100, [block], snapshot(100)).has_snapshot
    now += 50
    assert find(world, numbered(100, 1))  # used: it stays as long again
    now += 20
    assert [find(world, numbered(100, seed)) for seed in (1, 2)] == [True, False]
    assert (world.index.shelf.count, world.index.shelf.expired) == (1, 1)
    now += 61
    match = world.index.match(chain_of(np.concatenate([numbered(100, 1), numbered(20, 7)])))
    assert (match.is_hit, match.reason) == (False, Reason.NO_WINDOW)
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (0, 0)


def find(world: World, ids: np.ndarray) -> bool:
    """Say whether a prompt that goes on after `ids` finds a snapshot at their end."""
    match = world.index.match(chain_of(np.concatenate([ids, numbered(20, 7)])))
    world.index.release(match)
    return match.is_hit and match.row == len(ids) // STEP * STEP


def test_a_snapshot_that_a_match_holds_stays_and_counts() -> None:
    world = World(budget=BYTES)
    kept(world, ids=numbered(100, 1), has_snapshot=True)
    match = world.index.match(chain_of(numbered(100, 1)))
    assert match.shelved is not None
    kept(world, ids=numbered(100, 2), has_snapshot=True)
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (1, BYTES)
    assert find(world, numbered(100, 1))
    world.index.release(match)
    kept(world, ids=numbered(100, 2), has_snapshot=True)
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (1, BYTES)


def test_a_snapshot_that_is_forgotten_counts_while_a_match_holds_it() -> None:
    world = World()
    kept(world, ids=numbered(132, 1), has_snapshot=True)
    # it is found beside the prompt's way: the match has the block of the first tokens only
    match = world.index.match(chain_of(np.concatenate([numbered(127, 1), 1000 + numbered(20, 2)])))
    assert (match.row, match.block_ids, match.partial_tokens) == (126, (), 127)
    world.evict(9)
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (0, BYTES)
    assert match.shelved is not None
    assert match.shelved.snapshot.num_tokens == 132
    world.index.release(match)
    assert world.index.shelf.nbytes == 0


def test_a_snapshot_larger_than_the_budget_is_not_kept() -> None:
    world = World(budget=BYTES - 1)
    kept(world, ids=numbered(100), has_snapshot=True)
    assert (world.index.shelf.count, world.index.shelf.nbytes) == (0, 0)


@pytest.mark.parametrize("shared", [191, 192, 193])
def test_a_snapshot_of_another_continuation_serves_while_the_window_is_in_it(shared: int) -> None:
    # taken at 199, it has rows from 187 on: enough from 192 on
    world = World()
    kept(world, ids=numbered(199, 1), has_snapshot=True)
    ids = np.concatenate([numbered(199, 1)[:shared], 1000 + numbered(50, 2)])
    match = world.index.match(chain_of(ids))
    assert match.row == (192 if shared >= 192 else 0)
    assert match.reason is (Reason.DIVERGES if shared >= 192 else Reason.NO_WINDOW)


def test_a_snapshot_of_another_length_is_refused() -> None:
    world = World()
    with pytest.raises(InternalError, match="a snapshot of 40 tokens was offered for 41"):
        world.index.insert(chain_of(numbered(50)), 41, world.pool.allocate(1), snapshot(40))


# ------------------------------------------------------------------------------------------------------------- reasons


def test_every_miss_has_a_reason() -> None:
    world = World()
    ids = numbered(300, 1)
    assert reason(world, ids) == "nothing cached"
    kept(world, ids=ids)
    assert reason(world, ids) == "no window state"
    assert reason(world, ids[:6]) == "within one window of its start"
    kept(world, ids=ids[:250], has_snapshot=True)
    assert reason(world, ids[:256]) is None
    assert reason(world, ids) == "window state only at token 250"
    assert reason(world, np.concatenate([ids[:251], [1000] * 60])) == "diverges at token 251"
    kept(world, ids=numbered(100, 2), has_snapshot=True)
    assert reason(world, np.concatenate([numbered(100, 2), [7] * 9])) == "cached up to token 100"
    assert reason(world, numbered(100, 3)) == "diverges at token 0"
    assert Match(reason=Reason.FULL_MODE).reason_text == "full mode"


def reason(world: World, ids: np.ndarray) -> str | None:
    match = world.index.match(chain_of(ids))
    world.index.release(match)
    return match.reason_text


def test_the_approximate_lineage_is_named_and_never_read() -> None:
    world = World()
    ids = numbered(200, 1)
    blocks = world.pool.allocate(2)
    world.pool.seal(blocks[:1])
    other = chain_of(ids, "approximate")
    world.index.insert(other, 200, blocks, snapshot(200))
    match = world.index.match(chain_of(ids), approximate=other)
    assert (match.is_hit, match.reason) == (False, Reason.APPROXIMATE)
    assert world.index.match(chain_of(ids)).reason is Reason.NOTHING_CACHED
    assert world.index.match(other).num_tokens == 200


def test_marks_end_a_partial_hit() -> None:
    world = World()
    one = Chain({"lineage": "exact"})
    one.append(numbered(100), {60: b"picture 1"})
    world.index.insert(one, 100, world.pool.allocate(1))
    for content, common in ((b"picture 1", 100), (b"picture 2", 60)):
        other = Chain({"lineage": "exact"})
        other.append(numbered(100), {60: content})
        assert world.index.match(other, can_replay=True).num_tokens == common


# ---------------------------------------------------------------------------------------------------------------- rule


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 130), st.sampled_from([1, 2, 4]))
def test_the_first_row_leaves_the_decoder_its_tail(num_tokens: int, matched: int, window: int, step: int) -> None:
    matched = min(matched, num_tokens)
    row = exact_row(num_tokens, matched, window, step)
    assert row % step == 0
    assert 0 <= row <= matched
    assert row == 0 or num_tokens - row >= window
    assert row + step > min(matched, num_tokens - window)
    replayed = replayed_row(num_tokens, matched, window, step)
    assert replayed <= row
    assert replayed == 0 or matched - replayed >= window
