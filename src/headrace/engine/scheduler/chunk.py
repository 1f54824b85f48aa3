"""The next chunk of a prompt; pure arithmetic."""


def next_chunk(left: int, limit: int, tail: int, budget: int) -> int:
    """Return the rows of the next chunk, 0 if it has to wait.

    The last chunk has at least `tail` rows: the one before it is shortened, and the last one may exceed `limit` up to
    `tail` rows, never `budget`. Cutting a prompt with this gives the sizes of `headrace.core.chunk_plan` when the limit
    stays the same.

    Args:
        left: rows of the prompt that are not computed, at least `tail`.
        limit: most rows wanted.
        tail: rows that the last chunk must have.
        budget: rows that the step has left.

    Source: serving.md, rule D3.
    """
    limit = min(limit, budget)
    if left <= limit:
        return left
    if left > tail:
        return min(limit, left - tail)
    return left if left <= budget else 0
