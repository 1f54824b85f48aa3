"""What is cached, by the tokens that lead to it: blocks, partly filled last blocks, and snapshots."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.cache.chain import Chain, Piece
from headrace.cache.prefix_match import Match, Reason
from headrace.cache.prefix_tree import Node, best_start
from headrace.cache.resume_rule import exact_row, rebuilt_row, replayed_row
from headrace.cache.snapshot import Snapshot
from headrace.cache.snapshot_shelf import SnapshotShelf
from headrace.core.errors import InternalError


@dataclass(frozen=True)
class Inserted:
    """What the index has after an insertion.

    `block_ids` are those of the whole blocks: where the same tokens were cached before, others of the same content,
    which the owner can `share` to free its own. `has_snapshot`: the snapshot, or one as good, is kept.
    """

    block_ids: tuple[int, ...]
    has_snapshot: bool


class PrefixIndex:
    """Finds the longest cached prefix of a prompt, and forgets what was used least recently, last blocks first.

    Owns one reference to the block of every node and the kept snapshots. A block that only the index refers to can be
    evicted; a match refers to its blocks until it is begun from or released. `on_evict` is told the key and the block
    of every whole one, before it goes.
    """

    def __init__(self, pool: BlockPool, snapshot_budget: int, snapshot_ttl_s: float | None = None) -> None:
        self._pool = pool
        self._window, self._step = pool.shape.window, pool.shape.largest_ratio
        self._shelf = SnapshotShelf(snapshot_budget, snapshot_ttl_s)
        self._keyed: dict[bytes, Node] = {}  # roots and whole blocks
        self._nodes: dict[Node, None] = {}  # those with a block; parents before what follows them
        self._held: Counter[int] = Counter()
        self._listed: tuple[int, ...] | None = None  # its elements, until it changes
        self._lru: list[tuple[int, int, Node]] = []  # (last use, order, node): leaves, some out of date
        self._clock = 0
        self._order = 0
        self._evictable: tuple[int, int] | None = None  # (the pool's version, blocks)
        self.on_evict: Callable[[bytes, int], None] | None = None
        self.num_evicted = 0  # blocks that `evict` freed so far

    @property
    def shelf(self) -> SnapshotShelf:
        """The kept snapshots."""
        return self._shelf

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks that the index refers to, once for each reference."""
        if self._listed is None:
            self._listed = tuple(self._held.elements())
        return self._listed

    def held(self, block_id: int) -> int:
        """Return how many references of the index a block has."""
        return self._held[block_id]

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could free now."""
        if self._evictable is None or self._evictable[0] != self._pool.version:
            count = sum(self._pool.references(block_id) == number for block_id, number in self._held.items())
            self._evictable = (self._pool.version, count)
        return self._evictable[1]

    # ------------------------------------------------------------------------------------------------------ inserting

    def insert(
        self,
        chain: Chain,
        num_tokens: int,
        block_ids: Sequence[int],
        snapshot: Snapshot | None = None,
        *,
        is_interior: bool = False,
    ) -> Inserted:
        """Make the first tokens of a chain findable.

        A last block that is not whole is kept as it is: its owner may go on appending to it, never change what is there
        (`BlockTable.freeze`), and readers copy it.

        Args:
            chain: the tokens.
            num_tokens: how many of them, all committed.
            block_ids: the blocks that hold them; whole ones are sealed.
            snapshot: taken at `num_tokens`.
            is_interior: whether it lies inside a prompt, so that it goes first when room is needed.

        Returns:
            The blocks that the index has, and whether it has the snapshot.

        Raises:
            InternalError: a whole block is not sealed, or the snapshot is of another length.
        """
        if num_tokens == 0:
            return Inserted((), False)
        self._clock += 1
        node = self._deepest(chain, num_tokens // BLOCK_TOKENS)
        for place in range(node.end // BLOCK_TOKENS, num_tokens // BLOCK_TOKENS):
            if not self._pool.is_sealed(block_ids[place]):
                raise InternalError(f"block {block_ids[place]} is not sealed and was offered as a whole one")
            node = self._add(node, chain, place, (place + 1) * BLOCK_TOKENS, block_ids[place])
        whole = node.path()
        if num_tokens % BLOCK_TOKENS:
            node = self._tail(node, chain, num_tokens, block_ids[num_tokens // BLOCK_TOKENS])
        for used in node.path():
            self._touch(used)
        is_kept = False
        if snapshot is not None:
            if snapshot.num_tokens != num_tokens:
                raise InternalError(f"a snapshot of {snapshot.num_tokens} tokens was offered for {num_tokens}")
            if not is_interior:
                self._shelf.supersede([used.snapshots for used in node.path()], num_tokens)
            is_kept = self._shelf.add(node.snapshots, snapshot, self._clock, is_interior=is_interior)
        return Inserted(tuple(self._block(one) for one in whole[1:]), is_kept)

    def _deepest(self, chain: Chain, limit: int) -> Node:
        """Return the node of the most whole blocks, up to `limit`, that are here: the root at least."""
        for place in range(limit, 0, -1):
            if chain.keys[place] in self._keyed:
                return self._keyed[chain.keys[place]]
        if chain.keys[0] not in self._keyed:
            self._keyed[chain.keys[0]] = Node(None, chain.keys[0], chain.piece(0, 0).own(), 0, None)
        return self._keyed[chain.keys[0]]

    def _tail(self, parent: Node, chain: Chain, num_tokens: int, block_id: int) -> Node:
        """Return the node that has the tokens after `parent`: a longer one that begins so, or a new one."""
        place = num_tokens // BLOCK_TOKENS
        piece = chain.piece(place, num_tokens)
        near, common = parent.nearest(piece)
        if near is not None and common == len(piece.token_ids):
            return near
        return self._add(parent, chain, place, num_tokens, block_id)

    def _add(self, parent: Node, chain: Chain, place: int, end: int, block_id: int) -> Node:
        """Add a node, which takes the place of tails that it continues."""
        start = place * BLOCK_TOKENS
        key = chain.keys[place + 1] if end - start == BLOCK_TOKENS else None
        node = Node(parent, key, chain.piece(place, end).own(), start, block_id, self._clock)
        self._pool.retain([block_id])
        self._held[block_id] += 1
        self._listed = None
        self._nodes[node] = None
        if key is not None:
            self._keyed[key] = node
        tails = [other for other in parent.below if other.key is None]
        parent.below.append(node)
        for tail in tails:
            if tail.piece.common(node.piece) == len(tail.piece.token_ids):
                self._shelf.move(tail.snapshots, node.snapshots)
                self._remove(tail)
        return node

    # ------------------------------------------------------------------------------------------------------- matching

    def match(
        self, chain: Chain, *, can_replay: bool = False, can_rebuild: bool = False, approximate: Chain | None = None
    ) -> Match:
        """Find the longest cached prefix of a prompt and where to begin; the match refers to what it names.

        Args:
            chain: the prompt's tokens.
            can_replay: whether to begin with empty windows where no snapshot serves (an approximation).
            can_rebuild: whether to begin with empty windows so early that they are exact where they must be.
            approximate: the same tokens in the lineage that the request must not read; only to explain a miss.
        """
        found = self._find(chain, can_replay=can_replay, can_rebuild=can_rebuild)
        if found.num_tokens < chain.num_tokens and approximate is not None:
            path = self._walk(approximate)
            if path and path[-1].end + path[-1].nearest(self._next(approximate, path))[1] > found.num_tokens:
                found = replace(found, reason=Reason.APPROXIMATE)
        self._pool.retain(found.all_blocks)
        if found.shelved is not None:
            self._shelf.pin(found.shelved)
        return found

    def release(self, match: Match) -> None:
        """Give back what a match that was not begun from refers to."""
        self._pool.release(match.all_blocks)
        self.unpin(match)

    def unpin(self, match: Match) -> None:
        """Let go of a match's snapshot: its rows were restored."""
        if match.shelved is not None:
            self._shelf.unpin(match.shelved)

    def _find(self, chain: Chain, *, can_replay: bool, can_rebuild: bool) -> Match:
        self._clock += 1
        self._shelf.expire()
        path = self._walk(chain)
        if not path:
            return Match(reason=Reason.NOTHING_CACHED)
        piece = self._next(chain, path)
        near, common = path[-1].nearest(piece)
        matched = path[-1].end + common
        reason = None
        if matched < chain.num_tokens:
            at_end = not path[-1].below if near is None else common == len(near.piece.token_ids)
            reason = Reason.ENDS if at_end else Reason.DIVERGES
        target = exact_row(chain.num_tokens, matched, self._window, self._step)
        if target == 0:
            if chain.num_tokens < self._window + self._step and matched:
                reason, matched = Reason.WITHIN_WINDOW, 0
            return Match(reason=reason, at=matched)
        start = best_start(path, chain, target, self._window, self._step)
        replayed = replayed_row(chain.num_tokens, matched, self._window, self._step) if can_replay else 0
        row = start.row if start is not None else 0
        rebuilt = self._rebuilt(chain, matched) if can_rebuild else 0
        is_rebuilt, row = rebuilt > row, max(rebuilt, row)
        is_approximate = replayed > row
        if not row and not replayed:
            return Match(reason=Reason.NO_WINDOW)
        used = path if near is None else [*path, near]
        has_start = start is not None and not is_approximate and not is_rebuilt
        if start is not None and has_start:
            self._shelf.use(start.shelved, self._clock)
            used = used + start.node.path()
        for node in used:
            self._touch(node)
        at = matched
        if row < target and not is_approximate:
            reason, at = Reason.WINDOWS_REBUILT if is_rebuilt else Reason.WINDOW_BEFORE, row
        return Match(
            num_tokens=matched,
            block_ids=tuple(self._block(node) for node in path[1:]),
            partial=None if near is None else near.block,
            partial_tokens=common,
            row=replayed if is_approximate else row,
            shelved=start.shelved if start is not None and has_start else None,
            is_approximate=is_approximate,
            exact_from=target if is_rebuilt and not is_approximate else 0,
            reason=reason,
            at=at,
        )

    def depth(self, chain: Chain, limit: int) -> int:
        """Return how many of the first `limit` whole blocks of a chain are here."""
        return max(0, len(self._walk(chain)[: limit + 1]) - 1)

    def _rebuilt(self, chain: Chain, matched: int) -> int:
        layers = self._pool.shape.decoder_start
        return rebuilt_row(chain.num_tokens, matched, self._window, self._step, layers)

    def _walk(self, chain: Chain) -> list[Node]:
        """Return the root and the nodes of the chain's whole blocks that are here."""
        path = []
        for key in chain.keys:
            if key not in self._keyed:
                break
            path.append(self._keyed[key])
        return path

    def _next(self, chain: Chain, path: list[Node]) -> Piece:
        """Return the tokens after a path's, up to the end of their block."""
        return chain.piece(path[-1].end // BLOCK_TOKENS)

    # ------------------------------------------------------------------------------------------------------- evicting

    def evict(self, count: int) -> list[int]:
        """Free at least `count` blocks that only the index refers to, if there are so many; return the freed ones."""
        freed: list[int] = []
        for is_last_resort in (False, True):
            in_use = []
            while len(freed) < count and self._lru:
                entry = heapq.heappop(self._lru)
                used, _, node = entry
                if not node.is_live or node.below or node.last_used != used:
                    continue
                if not self._is_loose(node) and not (is_last_resort and any(map(self._is_loose, node.path()[1:]))):
                    in_use.append(entry)
                    continue
                if self.on_evict is not None and node.key is not None:
                    self.on_evict(node.key, self._block(node))
                freed += self._forget(node)
            for entry in in_use:
                heapq.heappush(self._lru, entry)
        self.num_evicted += len(freed)
        return freed

    def _is_loose(self, node: Node) -> bool:
        """Return whether only the index refers to a node's block."""
        block_id = self._block(node)
        return self._pool.references(block_id) == self._held[block_id]

    def clear(self) -> list[int]:
        """Forget everything; return the blocks that became free."""
        freed = []
        for node in list(reversed(self._nodes)):
            freed += self._forget(node)
        return freed

    def _forget(self, node: Node) -> list[int]:
        for shelved in list(node.snapshots.values()):
            self._shelf.drop(shelved)
        parent = node.parent
        freed = self._remove(node)
        if parent is not None and not parent.below:
            self._enlist(parent)
        return freed

    def _remove(self, node: Node) -> list[int]:
        """Take a leaf out of the tree; its snapshots are gone or moved before."""
        block_id, parent = self._block(node), node.parent
        node.is_live = False
        del self._nodes[node]
        if node.key is not None:
            del self._keyed[node.key]
        if parent is not None:
            parent.below.remove(node)
            if parent.block is None and not parent.below and parent.key is not None:
                del self._keyed[parent.key]
        self._held[block_id] -= 1
        self._listed = None
        if not self._held[block_id]:
            del self._held[block_id]
        return self._pool.release([block_id])

    def _touch(self, node: Node) -> None:
        node.last_used = self._clock
        if not node.below:
            self._enlist(node)

    def _enlist(self, node: Node) -> None:
        """Note that a leaf can be evicted in the order of its last use."""
        if node.block is None:
            return
        self._order += 1
        heapq.heappush(self._lru, (node.last_used, self._order, node))
        if len(self._lru) > 4 * len(self._nodes) + 64:
            leaves = [one for one in self._nodes if not one.below]
            self._lru = [(one.last_used, place, one) for place, one in enumerate(leaves)]
            heapq.heapify(self._lru)

    def _block(self, node: Node) -> int:
        if node.block is None:
            raise InternalError("a root of the prefix index has no block")
        return node.block
