"""Pools, states on them and a little engine without a scheduler, for tests of the cached model."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.chain import Chain
from headrace.cache.handover import begin_from, publish
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.prefix_match import Match
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import SlotPool
from headrace.core.chunk_plan import plan_chunks
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41

CPU = torch.device("cpu")


@dataclass
class Pages:
    """Pools for a model, poisoned, with an index and the states that are alive."""

    model: DeepseekV41
    num_blocks: int = 40
    num_slots: int = 8
    snapshot_budget: int = 1 << 24
    is_scattered: bool = False
    pool: BlockPool = field(init=False)
    slots: SlotPool = field(init=False)
    index: PrefixIndex = field(init=False)

    def __post_init__(self) -> None:
        shape = self.model.state_shape
        self.pool = BlockPool(shape, self.num_blocks, CPU, is_poisoned=True)
        self.slots = SlotPool(shape, self.num_slots, CPU)
        if self.is_scattered:  # neighbours in a table are no neighbours in the pool
            taken = self.pool.allocate(self.num_blocks)
            self.pool.release([*taken[::2], *taken[1::2][::-1]])
        self.index = PrefixIndex(self.pool, self.snapshot_budget)

    def new(self) -> SequenceState:
        """Return a state without tokens."""
        return SequenceState.on_slot(self.slots.acquire(), BlockTable(self.pool))

    def make_room(self, state: SequenceState, num_tokens: int) -> None:
        """Give a state's table the blocks for `num_tokens` tokens in all."""
        missing = -(-num_tokens // BLOCK_TOKENS) - len(state.table.block_ids)
        if missing > self.pool.num_free:
            self.index.evict(missing - self.pool.num_free)
        state.table.extend(self.pool.allocate(max(0, missing)))

    def drop(self, state: SequenceState) -> None:
        """Give back what a state lives on."""
        state.table.release()
        self.slots.release(state.slot)

    def begin(self, chain: Chain, *, can_replay: bool = False) -> tuple[SequenceState, Match]:
        """Return a state that begins from the longest match, and the match."""
        state, match = self.new(), self.index.match(chain, can_replay=can_replay)
        if match.is_hit:
            begin_from(match, state, self.index, compressed(self.model, chain.token_ids[: match.row]))
        return state, match

    def audit(self, **states: SequenceState) -> None:
        """Check that pools, index and these states agree."""
        owners = {name: state.table.block_ids for name, state in states.items()}
        self.pool.audit({**owners, "index": self.index.block_ids})
        self.slots.audit([state.slot.id for state in states.values()])


def chain_of(ids: np.ndarray, lineage: str = "exact") -> Chain:
    """Return a chain with these tokens."""
    chain = Chain({"model": "tiny", "lineage": lineage})
    chain.append(ids)
    return chain


def compressed(model: DeepseekV41, ids: np.ndarray) -> np.ndarray | None:
    """Return the compressed ids of the newest tokens of `ids`."""
    return None if model.addressing is None else model.addressing.compress(ids, None)[-200:]


def prompt_spans(model: DeepseekV41, state: SequenceState, ids: np.ndarray, chunk: int) -> Iterator[Span]:
    """Yield, one after the other has run, the spans of what a state has not seen of a prompt, in replay mode."""
    tail = min(model.config.window, len(ids))
    sizes = plan_chunks(len(ids) - state.length, chunk, tail)
    for place, size in enumerate(sizes):
        is_last = place == len(sizes) - 1
        part = ids[state.length : state.length + size]
        yield Span(state, part, tail if is_last else 0, is_replay=is_last)


def read_prompt(
    model: DeepseekV41, state: SequenceState, ids: np.ndarray, pages: Pages | None = None, chunk: int = 512
) -> Tensor:
    """Read the rest of a prompt in replay mode and return the logits [V] of its last token."""
    for span in prompt_spans(model, state, ids, chunk):
        if pages is not None:
            pages.make_room(state, state.length + span.num_rows)
        logits = model.forward([span]).logits
    return logits[-1]


def decode(
    model: DeepseekV41, state: SequenceState, logits: Tensor, count: int, pages: Pages | None = None
) -> list[Tensor]:
    """Go on greedily for `count` tokens; return the logits of every step."""
    seen = [logits]
    for _ in range(count):
        if pages is not None:
            pages.make_room(state, state.length + 1)
        seen.append(model.forward([Span(state, seen[-1].argmax().view(1).numpy(), 1)]).logits[-1])
    return seen


def publish_prompt(pages: Pages, state: SequenceState, ids: np.ndarray, **options: bool) -> Chain:
    """Put a state that has read `ids` into the index."""
    chain = chain_of(ids)
    publish(state, chain, pages.index, **options)
    return chain
