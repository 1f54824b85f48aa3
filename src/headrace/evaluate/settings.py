"""How much is judged: sizes that fit ten CPU-minutes for the shipped model, scaled by one number."""

from dataclasses import dataclass

from headrace.core.errors import UserError

NATURAL_POSITIONS = 3  # natural prompts come in rounds, two at least: clue early, in the middle, late


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to judge.

    Attributes:
        rows: half of the rows of pairs at the shortest length; everything else follows from it.
        lengths: tokens of retrieval rows, shortest first; those the model's context cannot hold are left out.
        num_keys, num_values, num_pairs, num_queries: of the pair probe, see `train/data/tasks/pairs.py`.
        piece_tokens: held-out documents are cut into pieces of so many tokens.
        draft_prompt_tokens, draft_tokens: prompt and greedy continuation that is drafted along.
        seed: of everything that is drawn.
    """

    rows: int = 12
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    num_keys: int = 16
    num_values: int = 16
    num_pairs: int = 16
    num_queries: int = 48
    piece_tokens: int = 2048
    draft_prompt_tokens: int = 384
    draft_tokens: int = 72
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that judge nothing.

        Raises:
            UserError: there are too few rows to give a standard error.
        """
        if self.rows < 2:
            raise UserError(f"rows is {self.rows}; 2 or more are accepted, or nothing has a standard error.", "rows")

    @property
    def num_pair_ids(self) -> int:
        """Reserved ids that the pair probe takes: pairs, queries, values."""
        return self.num_keys * self.num_values + self.num_keys + self.num_values

    @property
    def text_tokens(self) -> int:
        """Held-out tokens to judge, at most."""
        return self.rows * self.piece_tokens

    @property
    def draft_prompts(self) -> int:
        """Prompts to draft along."""
        return max(2, self.rows * 3 // 4)

    @property
    def pool_rows(self) -> int:
        """Documents per kind and length that pool and full scan are compared on."""
        return max(2, self.rows // 6)

    def pair_rows(self, tokens: int) -> int:
        """Rows of pairs of a length: fewer of the long ones, which cost more."""
        return max(2, round(2 * self.rows * (self.lengths[0] / tokens) ** 0.5))

    def natural_rows(self, tokens: int) -> int:
        """Prompts of each natural form of a length, the same number for every position of the clue."""
        rounds = max(2, self.rows * self.lengths[0] // tokens // NATURAL_POSITIONS)
        return NATURAL_POSITIONS * rounds
