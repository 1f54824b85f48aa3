"""A prefix index without a model, beside a dictionary of token strings that says what it must find."""

from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.cache.block_pool import BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.chain import Chain
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.prefix_match import Match
from headrace.cache.resume_rule import exact_row, replayed_row
from headrace.cache.snapshot import Snapshot
from headrace.cache.state_shape import StateShape

CPU = torch.device("cpu")
WINDOW, STEP = 6, 2
SHAPE = StateShape(32, 64, WINDOW, 3, 0, 2, {0: 2, 2: 1}, 0)
BYTES = 1000  # of each snapshot here


def snapshot(num_tokens: int, oldest: int | None = None) -> Snapshot:
    low = max(0, num_tokens - 2 * WINDOW) if oldest is None else oldest
    return Snapshot(num_tokens, low, WINDOW, 0, torch.zeros(2, 1, 400).byte(), torch.zeros(2, 1, 100).byte())


def chain_of(ids: np.ndarray, lineage: str = "exact") -> Chain:
    chain = Chain({"lineage": lineage})
    chain.append(ids)
    return chain


@dataclass
class Running:
    """A sequence without a model: its chain and its blocks."""

    chain: Chain
    table: BlockTable


@dataclass
class World:
    """Sequences, matches, an index, the dictionary that it is compared with, and what is written in every block."""

    num_blocks: int = 14
    budget: int = 10 * BYTES
    running: list[Running] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    strings: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(SHAPE, self.num_blocks, CPU)
        self.index = PrefixIndex(self.pool, self.budget)
        self.written = np.full((self.num_blocks, 128), -1)

    # ------------------------------------------------------------------------------------------------- sequences

    def write(self, one: Running, low: int) -> None:
        for position in range(low, one.chain.num_tokens):
            block_id = one.table.block_ids[position // 128]
            assert not self.pool.is_sealed(block_id)
            self.written[block_id, position % 128] = one.chain.token_ids[position]

    def room(self, count: int) -> bool:
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)
        return count <= self.pool.num_free

    def start(self, ids: np.ndarray) -> None:
        chain = chain_of(ids)
        match = self.match(chain)
        one = Running(chain, BlockTable(self.pool))
        needed = -(-len(ids) // 128) - len(match.block_ids)
        if not self.room(needed):
            self.index.release(match)
            return
        one.table.extend(match.block_ids)
        if match.partial is not None:
            one.table.extend([self.pool.copy(match.partial, match.partial_tokens)])
            self.written[one.table.block_ids[-1]] = self.written[match.partial]
            self.pool.release([match.partial])
            needed -= 1
        one.table.freeze(match.num_tokens)
        self.index.unpin(match)
        one.table.extend(self.pool.allocate(needed))
        self.write(one, match.num_tokens)
        self.running.append(one)

    def grow(self, one: Running, ids: np.ndarray) -> None:
        low = one.chain.num_tokens
        needed = -(-(low + len(ids)) // 128) - len(one.table.block_ids)
        if self.room(needed):
            one.table.extend(self.pool.allocate(needed))
            one.chain.append(ids)
            self.write(one, low)

    def publish(self, one: Running, *, has_snapshot: bool = False) -> None:
        length = one.chain.num_tokens
        one.table.seal(length)
        one.table.freeze(length)
        before = dict(enumerate(one.table.block_ids))
        taken = snapshot(length) if has_snapshot and length else None
        put = self.index.insert(one.chain, length, one.table.block_ids, taken)
        one.table.share(put.block_ids)
        text = self.text(one.chain.token_ids)
        for end in [*range(128, length + 1, 128), *([length] if length % 128 else [])]:
            self.add(text[: end * 8], before[(end - 1) // 128])
        self.forget_freed()

    # ------------------------------------------------------------------------------------------------ dictionary

    @staticmethod
    def text(ids: np.ndarray) -> bytes:
        return ids.astype(np.int64).tobytes()

    def add(self, string: bytes, block_id: int) -> None:
        is_tail = len(string) % 1024 != 0
        if string in self.strings or (is_tail and any(other.startswith(string) for other in self.strings)):
            return
        place = (len(string) - 8) // 1024
        for other in list(self.strings):
            if (len(other) - 8) // 1024 == place and string.startswith(other):
                del self.strings[other]
        self.strings[string] = block_id

    def forget_freed(self) -> None:
        self.strings = {text: block_id for text, block_id in self.strings.items() if self.pool.references(block_id)}

    def longest(self, ids: np.ndarray) -> int:
        common = [0]
        for string in self.strings:
            other = np.frombuffer(string, dtype=np.int64)
            length = min(len(ids), len(other))
            differs = np.flatnonzero(ids[:length] != other[:length])
            common.append(int(differs[0]) if len(differs) else length)
        return max(common)

    def best_row(self, ids: np.ndarray, target: int) -> int:
        """Look at every snapshot that the index has, one by one."""
        best = 0
        for node in self.index._nodes:
            tokens = np.concatenate([part.piece.token_ids for part in node.path()])
            length = min(len(ids), len(tokens))
            differs = np.flatnonzero(ids[:length] != tokens[:length])
            common = int(differs[0]) if len(differs) else length
            for num_tokens, shelved in node.snapshots.items():
                assert node.start < num_tokens <= node.end
                row = min(target, common, num_tokens) // STEP * STEP
                if max(0, row - WINDOW + 1) >= shelved.snapshot.oldest:
                    best = max(best, row)
        return best

    # --------------------------------------------------------------------------------------------------- matches

    def match(self, chain: Chain) -> Match:
        ids, matched = chain.token_ids, self.longest(chain.token_ids)
        target = exact_row(len(ids), matched, WINDOW, STEP)
        row = self.best_row(ids, target) if target else 0
        row = max(row, replayed_row(len(ids), matched, WINDOW, STEP))
        match = self.index.match(chain, can_replay=True)
        assert (match.num_tokens, match.row) == ((matched, row) if row else (0, 0))
        assert len(match.block_ids) * 128 + match.partial_tokens == match.num_tokens
        for place in range(match.num_tokens):
            assert self.written[match.all_blocks[place // 128], place % 128] == ids[place]
        return match

    def evict(self, count: int) -> None:
        can = self.index.num_evictable
        freed = self.index.evict(count)
        assert len(freed) == min(count, can)
        self.forget_freed()

    def check(self) -> None:
        owners = {f"sequence {place}": one.table.block_ids for place, one in enumerate(self.running)}
        owners |= {f"match {place}": one.all_blocks for place, one in enumerate(self.matches)}
        self.pool.audit({**owners, "index": self.index.block_ids})
        assert sorted(self.index.block_ids) == sorted(self.strings.values())
        assert self.index.shelf.nbytes <= self.budget
        kept = {id(one) for node in self.index._nodes for one in node.snapshots.values()}
        assert len(kept) == self.index.shelf.count
