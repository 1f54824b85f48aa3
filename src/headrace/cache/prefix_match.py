"""What the prefix index finds for a prompt, and why not more."""

from dataclasses import dataclass
from enum import Enum

from headrace.cache.snapshot_shelf import Shelved


class Reason(Enum):
    """Why a prompt was not served from the cache up to its end. The text is completed by a token count."""

    NOTHING_CACHED = "nothing cached"
    DIVERGES = "diverges at token"
    ENDS = "cached up to token"
    WITHIN_WINDOW = "within one window of its start"
    NO_WINDOW = "no window state"
    WINDOW_BEFORE = "window state only at token"
    WINDOWS_REBUILT = "windows rebuilt from token"
    APPROXIMATE = "approximate lineage"
    FULL_MODE = "full mode"


_WITH_TOKEN = {Reason.DIVERGES, Reason.ENDS, Reason.WINDOW_BEFORE, Reason.WINDOWS_REBUILT}


@dataclass(frozen=True)
class Match:
    """A prefix of a prompt that is cached. It has one reference to each block, until it is begun from or released.

    `num_tokens` is the length c whose entries are there (0 for a miss); `block_ids` are shared whole blocks,
    `partial` the block of the rest, `partial_tokens` of them, to be copied. The first row to compute is `row`: with the
    windows of `shelved`, or, if `is_approximate`, with none. `reason` says why c is not longer, or c is not used, or
    `row` lies further back than it could; `at` is its token. None: there is nothing to explain. With windows that begin
    empty and are rebuilt exactly, rows count from `exact_from` on.
    """

    num_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    partial: int | None = None
    partial_tokens: int = 0
    row: int = 0
    shelved: Shelved | None = None
    is_approximate: bool = False
    exact_from: int = 0
    reason: Reason | None = None
    at: int = 0

    @property
    def all_blocks(self) -> tuple[int, ...]:
        """Every block that the match refers to."""
        return self.block_ids if self.partial is None else (*self.block_ids, self.partial)

    @property
    def is_hit(self) -> bool:
        """Whether anything is reused."""
        return self.num_tokens > 0

    @property
    def recomputed(self) -> int:
        """Cached tokens that are encoded again: their entries are dropped."""
        return self.num_tokens - self.row

    @property
    def reason_text(self) -> str | None:
        """The reason as words."""
        if self.reason is None:
            return None
        return f"{self.reason.value} {self.at}" if self.reason in _WITH_TOKEN else self.reason.value
