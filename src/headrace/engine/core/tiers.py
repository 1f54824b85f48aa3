"""What leaves the pool rests in host memory and on disk, and comes back before a prompt starts."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.cache.prefix_index import PrefixIndex
from headrace.cache.sequence_state import SequenceState
from headrace.cache.snapshot import Snapshot
from headrace.cache.tiers.disk_tier import DiskTier, Item
from headrace.cache.tiers.fetch import Fetcher, Job, Wish
from headrace.cache.tiers.host_tier import HostTier
from headrace.cache.tiers.rates import LoadRule
from headrace.cache.tiers.segment import Kind
from headrace.cache.tiers.store import StoreOptions
from headrace.cache.tiers.windows import WindowPolicy, pack_rows, policy_of, window_key
from headrace.core.errors import UserError
from headrace.engine.core.options import EngineOptions
from headrace.engine.core.sequence import Sequence

_STEP_BYTES = 32 << 20  # brought into the pool in one step at most, so that the others' step stays short
_WAIT_S = 0.05
_MIN_RATE_ROWS = 64  # fewer rows of prompts in a step say little about the speed of prefill


class Tiers:
    """The tiers below the pool and the way between. Owns both, and the thread that reads them.

    Writing takes a copy of a block's bytes and never waits. Reading happens beside the steps; at the beginning of a
    step what was read becomes cached blocks, which the ordinary match then finds: the rules of resuming are the same.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        host: HostTier | None,
        disk: DiskTier | None,
        policy: WindowPolicy,
    ) -> None:
        self._pool, self._index = pool, index
        self.host, self.disk, self.policy = host, disk, policy
        self.rule = LoadRule()
        self._fetcher = Fetcher(host, disk, self.rule, pool.shape, pool.block_bytes)
        if host is not None:
            index.on_evict = self._spill

    # ------------------------------------------------------------------------------------------------------- reading

    def is_loading(self, sequence: Sequence, wishes: Iterable[Wish]) -> bool:
        """Say whether a prompt should wait for what the tiers have of it; ask them at the first call."""
        before = sequence.load
        if before is None or (before.is_settled and before.is_partial):
            taken = {} if before is None else dict(before.taken)
            job = Job(sequence.num_prompt, sequence.can_replay, tuple(wishes), taken=taken)
            sequence.load = job
            self._fetcher.add(job)
            return True
        return not before.is_settled

    def settle(self) -> None:
        """Bring what was read into the pool, a limited number of bytes."""
        left = max(1, _STEP_BYTES // self._pool.block_bytes)
        for job in self._fetcher.ready():
            left -= self._adopt(job, left)
            if left <= 0:
                return

    def wait(self) -> bool:
        """Wait a little for a prompt's blocks: there is nothing else to do. Say whether any are being read."""
        return self._fetcher.wait(_WAIT_S)

    def _adopt(self, job: Job, most: int) -> int:
        """Take blocks of a job, at most `most`, in order; the job is settled once no more can be taken."""
        if job.chosen is None:
            job.is_settled = True
            return 0
        chain = job.chosen.chain
        place = self._index.depth(chain, job.first + len(job.blocks))
        if place < job.first + job.num_taken:
            job.is_partial, job.is_settled = False, True  # what they follow was forgotten meanwhile
            return 0
        rest = job.blocks[place - job.first :] if place >= job.first else []
        missing = min(most, len(rest)) - self._pool.num_free
        if missing > 0:
            self._index.evict(missing)
        count = min(most, len(rest), self._pool.num_free)
        if count:
            fresh = self._pool.allocate(count)
            content = torch.frombuffer(bytearray(b"".join(rest[:count])), dtype=torch.uint8)
            self._pool.write_blocks(fresh, content.view(count, -1))
            self._pool.seal(fresh)
            self._index.insert(chain, (place + count) * BLOCK_TOKENS, [*([-1] * place), *fresh])
            self._pool.release(fresh)
        for tier in job.tiers[place - job.first :][:count]:
            job.taken[tier] = job.taken.get(tier, 0) + 1
        job.num_taken = max(job.num_taken, place - job.first + count)
        if count == len(rest) or count < most:
            job.is_partial = job.is_partial and count == len(rest)  # no room in the pool: no more turns
            self._finish(job, place + count)
        return count

    def _finish(self, job: Job, blocks: int) -> None:
        snapshot, wish = job.snapshot, job.chosen
        if wish is not None and snapshot is not None:
            have = self._index.depth(wish.chain, blocks)
            if have * BLOCK_TOKENS >= snapshot.num_tokens:
                self._index.insert(wish.chain, snapshot.num_tokens, [-1] * have, snapshot)
        job.blocks, job.snapshot = [], None
        job.is_settled = True

    # ------------------------------------------------------------------------------------------------------- writing

    def keep(self, sequence: Sequence, chain_tokens: int) -> None:
        """Let what a sequence has completed since the last call rest on disk; its chain holds `chain_tokens` tokens."""
        state = sequence.state
        if self.disk is None or state is None or chain_tokens // BLOCK_TOKENS * BLOCK_TOKENS <= sequence.kept:
            return
        keys, table = sequence.chain.keys, state.table.block_ids
        for place in range(sequence.kept // BLOCK_TOKENS, chain_tokens // BLOCK_TOKENS):
            self._put(sequence, Kind.BLOCK, (keys[place + 1], keys[place]), (place + 1) * BLOCK_TOKENS, table[place])
        sequence.kept = chain_tokens - chain_tokens % BLOCK_TOKENS
        self._keep_windows(sequence, state)

    def _keep_windows(self, sequence: Sequence, state: SequenceState) -> None:
        if sequence.exact_from:
            return
        oldest = max((ring.oldest for ring in state.encoder_rings), default=state.length)
        cuts = self.policy.due(oldest, state.length, sequence.kept_windows, state.shape.window)
        if not cuts:
            return
        snapshot = Snapshot.take(state)
        for cut in cuts:
            key = sequence.chain.keys[cut.end // BLOCK_TOKENS]
            payload = pack_rows(snapshot, cut)
            self._put(sequence, Kind.WINDOW, (window_key(key), key), cut.end, payload, tokens=cut.end - cut.first)
            sequence.kept_windows = cut.end

    def _put(
        self,
        sequence: Sequence,
        kind: Kind,
        keys: tuple[bytes, bytes],
        end: int,
        content: int | bytes,
        tokens: int = BLOCK_TOKENS,
    ) -> None:
        if self.disk is None:
            return
        payload = content if isinstance(content, bytes) else self._bytes_of(content)
        self.disk.put(
            Item(
                key=keys[0],
                parent=keys[1],
                kind=kind,
                is_approximate=sequence.is_approximate,
                num_tokens=end,
                tokens=tokens,
                payload=payload,
            )
        )

    def _spill(self, key: bytes, block_id: int) -> None:
        if self.host is not None:
            self.host.put(key, self._bytes_of(block_id))

    def _bytes_of(self, block_id: int) -> bytes:
        return self._pool.read_blocks([block_id]).numpy().tobytes()

    # --------------------------------------------------------------------------------------------------------- books

    def began(self, sequence: Sequence, num_blocks: int, exact_keys: list[bytes] | None) -> None:
        """Note that a sequence starts after `num_blocks` cached blocks, and where they came from.

        `exact_keys`: those of its tokens in the exact lineage where it is an approximate one. Blocks that it has from
        there rest on disk once, under two keys.
        """
        load = sequence.load
        found = load.taken if load is not None else {}
        tiers = {name: count for name, count in found.items() if count}
        excess = sum(tiers.values()) - num_blocks
        for name in sorted(tiers):
            cut = max(0, min(excess, tiers[name]))
            tiers[name], excess = tiers[name] - cut, excess - cut
        sequence.cached_blocks = {"device": num_blocks - sum(tiers.values()), "host": 0, "disk": 0, **tiers}
        sequence.kept = sequence.kept_windows = num_blocks * BLOCK_TOKENS
        used = sequence.chain.keys[1 : num_blocks + 1]
        if exact_keys is not None:
            keys = sequence.chain.keys
            for place in range(num_blocks):
                names = keys[place + 1], keys[place]
                self._put(sequence, Kind.ALIAS, names, (place + 1) * BLOCK_TOKENS, exact_keys[place + 1])
        if self.host is not None:
            self.host.touch(used)
        if self.disk is not None:
            self.disk.touch(used)

    def note_prefill(self, rows: int, seconds: float) -> None:
        """Take in how long a step with so many rows of prompts took."""
        if rows >= _MIN_RATE_ROWS:
            self.rule.prefill_rows.note(rows, seconds)

    def status(self) -> dict[str, float]:
        """Return the metrics of the tiers."""
        found: dict[str, float] = {"tier_loads_refused": self.rule.refused}
        if self.host is not None:
            host = self.host
            found |= {
                "host_tier_blocks": host.count,
                "host_tier_bytes": host.nbytes,
                "host_tier_hits": host.hits,
                "host_tier_evicted": host.evicted,
            }
        if self.disk is not None:
            found |= {f"disk_tier_{name}": value for name, value in self.disk.status().items()}
        return found

    def clear(self, *, disk: bool) -> bool:
        """Forget what is in host memory, and on disk if asked; return whether all of it is forgotten."""
        if self.host is not None:
            self.host.clear()
        return not disk or self.disk is None or self.disk.clear()

    def close(self) -> None:
        """Write what waits and let go of the directory."""
        self._fetcher.close()
        if self.disk is not None:
            self.disk.close()


def open_tiers(
    options: EngineOptions, pool: BlockPool, index: PrefixIndex, namespace: Mapping[str, str]
) -> Tiers | None:
    """Return the tiers that the options ask for, None if none.

    Raises:
        UserError: the directory can be neither created nor read.
    """
    if not options.has_prefix_cache or (options.cache_dir is None and not options.host_cache_bytes):
        return None
    disk = None
    if options.cache_dir is not None:
        limits = StoreOptions(max_bytes=options.cache_disk_bytes, min_free=options.min_free_disk)
        sizes = {"block bytes": str(pool.block_bytes), "layout": str(sorted(pool.shape.source_ratios.items()))}
        try:
            disk = DiskTier(Path(options.cache_dir), {**namespace, **sizes}, limits)
        except OSError as problem:
            raise UserError(
                f"cannot use {options.cache_dir} as a cache: {problem.strerror or problem}.", param="cache_dir"
            ) from None
    host = HostTier(options.host_cache_bytes) if options.host_cache_bytes else None
    return Tiers(pool, index, host, disk, policy_of(options.window_policy, options.checkpoint_every))
