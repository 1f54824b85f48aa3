"""The tree behind the prefix index: one node per cached block, and what a prompt has in common with it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.chain import Chain, Piece
from headrace.cache.snapshot_shelf import Home, Shelved


@dataclass(eq=False, slots=True)
class Node:
    """A block whose tokens follow those of its parent: a whole one (it has a key), a tail, or a root (no block).

    `start` is the position of its first token, `below` what follows it, `snapshots` those taken at its tokens.
    """

    parent: "Node | None"
    key: bytes | None
    piece: Piece
    start: int
    block: int | None
    last_used: int = 0
    is_live: bool = True
    below: list["Node"] = field(default_factory=list)
    snapshots: Home = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.piece.token_ids)

    def nearest(self, piece: Piece) -> tuple["Node | None", int]:
        """Return what follows with the longest common start, and how long that is (0: nothing)."""
        best, longest = None, 0
        for node in self.below:
            count = node.piece.common(piece)
            if count > longest:
                best, longest = node, count
        return best, longest

    def path(self) -> list["Node"]:
        """Return the nodes from the root down to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


@dataclass(frozen=True)
class Start:
    """A place where a prompt can begin exactly: at `row`, with the windows of `shelved`, found at `node`."""

    row: int
    shelved: Shelved
    node: Node


def best_start(path: list[Node], chain: Chain, target: int, window: int, step: int) -> Start | None:
    """Return the latest place, at most `target`, at which a kept snapshot lets a prompt begin; None if there is none.

    A snapshot taken further on, even of another continuation, serves as well while the window before the place is in
    it: rows after the place are left out, and rows before it depend on common tokens only.

    Args:
        path: nodes of the prompt's whole blocks that are cached, from the root on.
        chain: the prompt.
        target: the best place, a multiple of `step`.
        window: W.
        step: every place is a multiple of it.
    """
    best: Start | None = None
    for depth in range(len(path) - 1, -1, -1):
        node = path[depth]
        # nothing at this node or beside its continuation serves a place further on than this
        if best is not None and best.row >= min(target, node.end + BLOCK_TOKENS - step):
            break
        following = path[depth + 1] if depth + 1 < len(path) else None
        for place, limit in _places(node, following, chain, window):
            for shelved in place.snapshots.values():
                row = min(target, limit, shelved.snapshot.num_tokens)
                row -= row % step
                if row > (best.row if best else 0) and shelved.snapshot.covers(row):
                    best = Start(row, shelved, place)
    return best


def _places(node: Node, following: Node | None, chain: Chain, window: int) -> Iterator[tuple[Node, int]]:
    """Yield a node of the path and the nodes beside the path below it, with how many first tokens the prompt shares."""
    yield node, node.end
    piece = chain.piece(node.end // BLOCK_TOKENS)
    for other in node.below:
        if other is following or not (other.snapshots or other.below):
            continue
        limit = node.end + other.piece.common(piece)
        waiting = [other]
        while waiting:
            place = waiting.pop()
            yield place, limit
            waiting += [under for under in place.below if under.start <= limit + window + 1]
