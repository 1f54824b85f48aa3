"""Blocks of global entries: 128 tokens of all KV sources under one id, allocated once, counted by reference."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.cache.entry_store import plane_widths
from headrace.cache.state_shape import StateShape
from headrace.core.errors import InternalError

BLOCK_TOKENS = 128
_NAN_SCALES = {1: 0x7F, 3: 0xFF}  # plane -> a scale byte that is no number: E4M3 of values, E8M0 of index keys


class BlockPool:
    """Planes of every source for `num_blocks` blocks, and who refers to them.

    Plane p of a source of ratio r is uint8 [num_blocks * 128 / r, width]; its rows of block b begin at b * 128 / r. A
    block is free while nobody refers to it. It is sealed once all its tokens are committed, and never written again.
    `is_poisoned` fills free blocks with scales that are no numbers, so that a stale read is seen in the result.

    `version` changes with every change of a reference.
    """

    def __init__(self, shape: StateShape, num_blocks: int, device: torch.device, *, is_poisoned: bool = False) -> None:
        wrong = [ratio for ratio in shape.source_ratios.values() if BLOCK_TOKENS % ratio]
        if wrong:
            raise InternalError(f"blocks of {BLOCK_TOKENS} tokens do not hold whole entries of {wrong[0]} tokens")
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.version = 0
        self._is_poisoned = is_poisoned
        widths = plane_widths(shape.head_dim, shape.index_head_dim)
        self._planes = {
            source: tuple(
                torch.zeros((num_blocks * (BLOCK_TOKENS // ratio), width), dtype=torch.uint8, device=device)
                for width in widths
            )
            for source, ratio in shape.source_ratios.items()
        }
        self._references = [0] * num_blocks
        self._sealed = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the newest freed, at first the lowest id, is taken first
        if is_poisoned:
            self._poison(self._free)

    def planes(self, source: int) -> tuple[Tensor, ...]:
        """Return the planes of a source: value codes, value scales, key codes, key scales."""
        return self._planes[source]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, measured from the buffers."""
        return sum(plane.untyped_storage().nbytes() for planes in self._planes.values() for plane in planes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, measured from the buffers."""
        return sum(part.shape[1] for part in self._by_block())

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    def references(self, block_id: int) -> int:
        """Return how many references a block has; 0 means free."""
        return self._references[block_id]

    def is_sealed(self, block_id: int) -> bool:
        """Say whether a block's content can no longer change."""
        return self._sealed[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; each has one reference.

        Raises:
            InternalError: fewer are free; whoever plans a step frees blocks before it.
        """
        if count > len(self._free):
            raise InternalError(f"{count} blocks were asked for and {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._references[block_id] = 1
        self.version += 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block.

        Raises:
            InternalError: a block is free.
        """
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise InternalError(f"block {block_id} is free and was referred to")
            self._references[block_id] += 1
        self.version += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Take one reference from each block and return those that became free.

        Raises:
            InternalError: a block is free already.
        """
        freed = []
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise InternalError(f"block {block_id} was freed twice")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                freed.append(block_id)
                self._sealed[block_id] = False
                self._free.append(block_id)
        if self._is_poisoned and freed:
            self._poison(freed)
        self.version += 1
        return freed

    def seal(self, block_ids: Iterable[int]) -> None:
        """Declare that all tokens of these blocks are committed; nothing is written to them from now on.

        Raises:
            InternalError: a block is free.
        """
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise InternalError(f"block {block_id} is free and was sealed")
            self._sealed[block_id] = True

    def copy(self, block_id: int, num_tokens: int) -> int:
        """Return a new block with the entries that the first `num_tokens` tokens of another complete.

        Raises:
            InternalError: no block is free.
        """
        (copied,) = self.allocate(1)
        for source, ratio in self.shape.source_ratios.items():
            rows, per_block = num_tokens // ratio, BLOCK_TOKENS // ratio
            start, to = block_id * per_block, copied * per_block
            for plane in self._planes[source]:
                plane[to : to + rows] = plane[start : start + rows]
        return copied

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Return the bytes of blocks, uint8 [n, block_bytes] in host memory: source by source, plane by plane."""
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        return torch.cat([part.index_select(0, index) for part in self._by_block()], 1).cpu()

    def write_blocks(self, block_ids: Sequence[int], content: Tensor) -> None:
        """Put bytes that `read_blocks` gave into blocks.

        Raises:
            InternalError: a block is sealed.
        """
        sealed = [block_id for block_id in block_ids if self._sealed[block_id]]
        if sealed:
            raise InternalError(f"block {sealed[0]} is sealed and was written")
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        parts = self._by_block()
        pieces = content.to(self.device).split([part.shape[1] for part in parts], 1)
        for part, piece in zip(parts, pieces, strict=True):
            part.index_copy_(0, index, piece)

    def audit(self, owners: Mapping[str, Iterable[int]]) -> None:
        """Check that every block is free or referred to by exactly these owners (an owner may name a block again).

        Raises:
            InternalError: the first block that is not, with what its count says and who names it.
        """
        named: Counter[int] = Counter()
        names: dict[int, list[str]] = {}
        for owner, block_ids in owners.items():
            for block_id in block_ids:
                named[block_id] += 1
                names.setdefault(block_id, []).append(owner)
        free = Counter(self._free)
        for block_id, references in enumerate(self._references):
            if references != named[block_id]:
                owned = ", ".join(names.get(block_id, [])) or "nobody"
                raise InternalError(
                    f"block {block_id} counts {references} references and has {named[block_id]} ({owned})"
                )
            if free[block_id] != (references == 0):
                raise InternalError(
                    f"block {block_id} with {references} references is {free[block_id]} times on the free list"
                )
        strange = [block_id for block_id in [*named, *free] if not 0 <= block_id < self.num_blocks]
        if strange:
            raise InternalError(f"block {strange[0]} is not one of the pool's {self.num_blocks}")

    def _by_block(self) -> list[Tensor]:
        """Every plane as [num_blocks, bytes], in the order in which blocks are exported."""
        return [plane.view(self.num_blocks, -1) for planes in self._planes.values() for plane in planes]

    def _poison(self, block_ids: Sequence[int]) -> None:
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for planes in self._planes.values():
            for which, byte in _NAN_SCALES.items():
                planes[which].view(self.num_blocks, -1).index_fill_(0, index, byte)
