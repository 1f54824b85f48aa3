"""The numbers a scheduler is built with, checked once."""

from dataclasses import dataclass

from headrace.core.errors import UserError

_AT_LEAST_ONE = (
    "window", "num_blocks", "num_slots", "max_rows", "chunk", "max_waiting", "max_context", "block_bytes",
    "slot_bytes", "block_tokens", "max_partial", "patience",
)  # fmt: skip
_AT_LEAST_ZERO = ("host_bytes", "headroom_blocks")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets and rules of fairness.

    Args:
        window: W, tokens of the sliding window; the last chunk of a replayed prompt has min(W, N) rows at least.
        num_blocks: blocks in the pool.
        num_slots: sequences that can have their state on the device at once.
        max_rows: rows of one step: decode rows and prefill rows together.
        chunk: most prefill rows of one request in a step; the last chunk may exceed it up to min(W, N).
        max_waiting: requests that may wait for their first step; one more is refused.
        max_context: tokens of the longest sequence, prompt and answer together.
        block_bytes: bytes of one block.
        slot_bytes: bytes of one slot.
        host_bytes: host memory for the states and blocks of preempted requests.
        block_tokens: tokens of one block.
        max_partial: prompts that may be in prefill at once.
        long_rows: most rows of one prompt in a step while another prompt comes after it, its last min(W, N) rows apart;
            None is half of what the budget leaves beside a full set of decode rows.
        prefill_rows: most prefill rows of a step that also decodes; None sets no limit but the budget.
        patience: steps in a row that a prompt in prefill may go without rows; then it goes first, once.
        headroom_blocks: blocks per running request that a start or a return must leave obtainable.

    Raises:
        UserError: a number is not possible, or the budget cannot hold a window beside the decode rows.
    """

    window: int
    num_blocks: int
    num_slots: int
    max_rows: int
    chunk: int
    max_waiting: int
    max_context: int
    block_bytes: int
    slot_bytes: int
    host_bytes: int = 0
    block_tokens: int = 128
    max_partial: int = 2
    long_rows: int | None = None
    prefill_rows: int | None = None
    patience: int = 8
    headroom_blocks: int = 1

    def __post_init__(self) -> None:
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for name in names:
                if getattr(self, name) < least:
                    raise UserError(
                        f"{name} is {getattr(self, name)}; accepted is a whole number from {least}", param=name
                    )
        if self.max_rows < self.window + self.num_slots:
            raise UserError(
                f"max_rows is {self.max_rows}; accepted is {self.window + self.num_slots} or more: a window of "
                f"{self.window} rows and one decode row for each of {self.num_slots} slots",
                param="max_rows",
            )
        if self.long_rows is not None and self.long_rows < 1:
            raise UserError(f"long_rows is {self.long_rows}; accepted is a whole number from 1", param="long_rows")
        if self.prefill_rows is not None and self.prefill_rows < self.window:
            raise UserError(
                f"prefill_rows is {self.prefill_rows}; accepted is {self.window} or more, the rows of one window",
                param="prefill_rows",
            )

    @property
    def contended_rows(self) -> int:
        """Most rows of one prompt in a step while another comes after it."""
        return max(1, (self.max_rows - self.num_slots) // 2) if self.long_rows is None else self.long_rows

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)
