"""The blocks of one sequence, in the order of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.cache.block_pool import BLOCK_TOKENS, BlockPool
from headrace.core.errors import InternalError


class BlockTable:
    """Which block holds which 128 tokens; shared by the stores of all sources of a sequence.

    Owns one reference to each of its blocks. `write_floor` counts the first tokens whose entries can no longer change,
    because somebody else reads them or may: entries below it are there already and are never written, and the
    sequence cannot go back below it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.write_floor = 0
        self._ids: list[int] = []
        self._num_sealed = 0
        self._index = torch.zeros(0, dtype=torch.int64, device=pool.device)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks, that of the first tokens first."""
        return tuple(self._ids)

    @property
    def index(self) -> Tensor:
        """The blocks as int64 [n]."""
        return self._index

    @property
    def capacity(self) -> int:
        """Tokens that the blocks hold."""
        return len(self._ids) * BLOCK_TOKENS

    def extend(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end; their references become the table's."""
        self._ids.extend(block_ids)
        self._refresh()

    def freeze(self, num_tokens: int) -> None:
        """Let nothing change in the entries of the first `num_tokens` tokens from now on.

        Raises:
            InternalError: the table holds fewer tokens.
        """
        if num_tokens > self.capacity:
            raise InternalError(f"{num_tokens} tokens were frozen and the blocks hold {self.capacity}")
        self.write_floor = max(self.write_floor, num_tokens)

    def seal(self, num_tokens: int) -> None:
        """Seal every block that the first `num_tokens` tokens, all committed, fill."""
        full = num_tokens // BLOCK_TOKENS
        if full > self._num_sealed:
            self.freeze(full * BLOCK_TOKENS)
            self.pool.seal(self._ids[self._num_sealed : full])
            self._num_sealed = full

    def share(self, block_ids: Sequence[int]) -> None:
        """Use other blocks of the same content for the first tokens; the table's own go back to the pool."""
        changed = [(place, new) for place, new in enumerate(block_ids) if new != self._ids[place]]
        for place, new in changed:
            self.pool.retain([new])
            self.pool.release([self._ids[place]])
            self._ids[place] = new
        if changed:
            self._refresh()

    def release(self) -> list[int]:
        """Give all blocks back and return those that became free; the table is empty after."""
        freed = self.pool.release(self._ids)
        self._ids, self.write_floor, self._num_sealed = [], 0, 0
        self._refresh()
        return freed

    def check_writable(self, low_token: int, high_token: int) -> None:
        """Refuse to write entries of tokens `low_token` .. `high_token` - 1 into sealed blocks.

        Raises:
            InternalError: a block is sealed.
        """
        for place in range(low_token // BLOCK_TOKENS, -(-high_token // BLOCK_TOKENS)):
            if self.pool.is_sealed(self._ids[place]):
                raise InternalError(f"block {self._ids[place]} is sealed and was written at token {low_token}")

    def places(self, rows: Tensor, ratio: int) -> Tensor:
        """Return where rows [n] of a source of ratio `ratio` lie in its planes, [n] int64."""
        per_block = BLOCK_TOKENS // ratio
        blocks = torch.div(rows, per_block, rounding_mode="floor")
        return self._index.index_select(0, blocks).mul_(per_block).add_(rows - blocks * per_block)

    def blocks_of(self, low_row: int, high_row: int, ratio: int) -> tuple[Tensor, int]:
        """Return the blocks [m] int64 that rows `low_row` .. `high_row` - 1 lie in, and the first one's first row."""
        per_block = BLOCK_TOKENS // ratio
        first = low_row // per_block
        return self._index[first : -(-high_row // per_block)], first * per_block

    def _refresh(self) -> None:
        self._index = torch.tensor(self._ids, dtype=torch.int64, device=self.pool.device)
