"""Prompts that begin alike: what the engine asks of the prefix index, and what it tells it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.cache.block_table import BlockTable
from headrace.cache.chain import Chain
from headrace.cache.handover import begin_from
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.prefix_match import Match, Reason
from headrace.cache.resume_rule import exact_row
from headrace.cache.sequence_state import SequenceState
from headrace.cache.slot_pool import Slot
from headrace.cache.snapshot import Snapshot
from headrace.cache.tiers.fetch import Wish
from headrace.engine.core.image_rows import PromptImages
from headrace.engine.core.options import EngineOptions
from headrace.engine.core.sequence import Sequence
from headrace.engine.core.tiers import Tiers, open_tiers
from headrace.engine.scheduler.plan import PrefillChunk
from headrace.memory.addressing import Addressing

_LINEAGE = "lineage"


class PrefixCache:
    """Owns the prefix index and the matches of one step between its plan and its admissions."""

    def __init__(
        self,
        blocks: BlockPool,
        snapshot_budget: int,
        namespace: Mapping[str, str],
        addressing: Addressing | None,
        *,
        every: int,
        is_on: bool,
        ttl_s: float | None = None,
    ) -> None:
        self.index = PrefixIndex(blocks, snapshot_budget, ttl_s)
        self._blocks = blocks
        self._namespace = dict(namespace)
        self._addressing = addressing
        self._every = every
        self._is_on = is_on
        self.tiers: Tiers | None = None
        self._matches: dict[str, tuple[Match, Chain, bool]] = {}  # and whether the chain is approximate

    def chain(
        self, token_ids: np.ndarray, salt: str | None, images: PromptImages | None, *, is_approximate: bool = False
    ) -> Chain:
        """Return a chain of tokens and images in the lineage that is named."""
        chain = Chain({**self._namespace, "salt": salt or "", _LINEAGE: "approximate" if is_approximate else "exact"})
        chain.append(token_ids, None if images is None else images.marks)
        return chain

    # ------------------------------------------------------------------------------------------------------ a step

    def begin_step(self, sequences: Iterable[Sequence]) -> None:
        """Let what was read from lower tiers be found, and what is complete rest on them."""
        if self.tiers is None:
            return
        self.tiers.settle()
        for sequence in sequences:
            if sequence.state is not None and sequence.state.length >= sequence.kept + BLOCK_TOKENS:
                self._follow(sequence, sequence.state.length)
                self.tiers.keep(sequence, sequence.state.length)

    def open_tiers(self, options: EngineOptions) -> None:
        """Let what leaves the pool rest in host memory and on disk, where the options say so.

        Raises:
            UserError: the directory can be neither created nor read.
        """
        self.tiers = open_tiers(options, self._blocks, self.index, self._namespace)

    @property
    def tier_status(self) -> dict[str, float]:
        """The metrics of the lower tiers, if there are any."""
        return {} if self.tiers is None else self.tiers.status()

    def clear(self, *, disk: bool = False) -> bool:
        """Forget every cached prompt, those on disk only if asked; return whether all of it is forgotten."""
        self.index.clear()
        return self.tiers is None or self.tiers.clear(disk=disk)

    def close(self) -> None:
        """Let go of the lower tiers."""
        if self.tiers is not None:
            self.tiers.close()

    def note_prefill(self, chunks: Iterable[PrefillChunk], seconds: float) -> None:
        """Take in how long a step with these rows of prompts took."""
        if self.tiers is not None:
            self.tiers.note_prefill(sum(chunk.stop - chunk.start for chunk in chunks), seconds)

    def wait(self) -> bool:
        """Wait a little for a prompt whose blocks are being read; say whether there is one."""
        return self.tiers is not None and self.tiers.wait()

    def look_up(self, sequence: Sequence) -> Match | None:
        """Find the best start for a prompt; it is held until `begin` or `forget`.

        None: lower tiers are being asked, so look again in a later step.
        """
        self._let_go(sequence.request_id)
        if sequence.load is not None and not sequence.load.is_settled:
            return None
        if not self._is_on:
            return Match()
        if sequence.mode == "full":
            return Match(reason=Reason.FULL_MODE)
        exact = sequence.chain
        salt, prompt_ids = sequence.answer.params.cache_salt, sequence.submission.prompt_ids
        other = self.chain(prompt_ids, salt, sequence.images, is_approximate=True)
        found = self.index.match(exact, can_replay=sequence.can_replay, can_rebuild=True, approximate=other)
        if self.tiers is not None and self._is_loading(sequence, found, other):
            self.index.release(found)
            return None
        is_approximate = found.is_approximate
        if sequence.can_replay:
            second = self.index.match(other, can_replay=True)
            if second.row > found.row:
                found, second, is_approximate = second, found, True
            self.index.release(second)
        self._matches[sequence.request_id] = (found, other if is_approximate else exact, is_approximate)
        return found

    def matched_blocks(self, request_id: str) -> tuple[int, ...]:
        """Return the whole blocks that a request found in this step."""
        found = self._matches.get(request_id)
        return found[0].block_ids if found is not None else ()

    def matched_row(self, request_id: str) -> int:
        """Return the first row that a request with a match in this step will compute."""
        found = self._matches.get(request_id)
        return found[0].row if found is not None else 0

    def begin(self, sequence: Sequence, slot: Slot) -> SequenceState:
        """Return the state that a sequence starts with, on its slot, after its match if it has one."""
        state = SequenceState.on_slot(slot, BlockTable(self._blocks))
        nothing = (
            Match(reason=Reason.FULL_MODE if sequence.mode == "full" and self._is_on else None),
            sequence.chain,
            False,
        )
        found, chain, is_approximate = self._matches.pop(sequence.request_id, nothing)
        sequence.cache_reason = found.reason_text
        if not found.is_hit:
            self.index.release(found)
            return state
        exact = sequence.chain
        sequence.chain, sequence.is_approximate = chain, is_approximate
        sequence.cached_tokens, sequence.cached_blocks = found.num_tokens, {"device": len(found.block_ids)}
        if self.tiers is not None:
            self.tiers.began(sequence, len(found.block_ids), exact.keys if is_approximate else None)
        sequence.exact_from = found.exact_from
        found = self._make_room(found)
        begin_from(found, state, self.index, self._compressed(sequence, found.row, state))
        return state

    def forget(self, keep: Iterable[str] = ()) -> None:
        """Let go of matches that no admission used."""
        kept = set(keep)
        for request_id in [name for name in self._matches if name not in kept]:
            self._let_go(request_id)

    def publish(self, sequence: Sequence, *, is_end: bool) -> None:
        """Make a sequence's committed tokens findable, with the state of its windows.

        Inside a prompt this happens every `snapshot_every` tokens; at the end of a prompt and of an answer always.
        """
        state = sequence.state
        if state is None:
            return
        state.table.seal(state.length)
        if state.length < sequence.exact_from:
            return
        if sequence.exact_from:
            state.settle_encoder(sequence.exact_from)
            sequence.exact_from = 0
        if not self._is_on or state.length == 0 or state.length <= sequence.published:
            return
        if not is_end and state.length - sequence.published < self._every:
            return
        self._follow(sequence, state.length)
        self.index.insert(
            sequence.chain, state.length, state.table.block_ids, Snapshot.take(state), is_interior=not is_end
        )
        state.table.freeze(state.length)
        sequence.published = state.length

    # ------------------------------------------------------------------------------------------------------- private

    def _is_loading(self, sequence: Sequence, found: Match, other: Chain) -> bool:
        if self.tiers is None or (sequence.load is not None and not sequence.load.is_partial):
            return False
        shape = self._blocks.shape
        if found.row >= exact_row(sequence.num_prompt, sequence.num_prompt, shape.window, shape.largest_ratio):
            return False  # no tier lets it begin later
        most = sequence.num_prompt // BLOCK_TOKENS
        wishes = [Wish(sequence.chain, False, self.index.depth(sequence.chain, most), found.row)]
        if sequence.can_replay:
            wishes.append(Wish(other, True, self.index.depth(other, most), found.row))
        return most > 0 and self.tiers.is_loading(sequence, wishes)

    def _let_go(self, request_id: str) -> None:
        found = self._matches.pop(request_id, None)
        if found is not None:
            self.index.release(found[0])

    def _make_room(self, found: Match) -> Match:
        """See that there is a free block for the copy of a partial one, if need be that one's own."""
        if found.partial is None or self._blocks.num_free or self.index.evict(1):
            return found
        content = self._blocks.read_blocks([found.partial])
        self._blocks.release([found.partial])
        self.index.evict(1)
        (fresh,) = self._blocks.allocate(1)
        self._blocks.write_blocks([fresh], content)
        return replace(found, block_ids=(*found.block_ids, fresh), partial=None, partial_tokens=0)

    def _compressed(self, sequence: Sequence, position: int, state: SequenceState) -> np.ndarray | None:
        if self._addressing is None:
            return None
        low = max(0, position - state.shape.lookback_depth)
        is_dead = None if sequence.images is None else sequence.images.is_image(low, position)
        return self._addressing.compress(sequence.submission.prompt_ids[low:position], is_dead)

    def _follow(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the chain hold the tokens of the answer too."""
        missing = num_tokens - sequence.chain.num_tokens
        if missing > 0:
            new = sequence.answer.token_ids
            first = sequence.chain.num_tokens - sequence.num_prompt
            sequence.chain.append(np.array(new[first : first + missing], dtype=np.int64))
