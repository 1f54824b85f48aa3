"""How a prompt is cut into chunks; pure arithmetic."""

from headrace.core.errors import UserError


def plan_chunks(num_tokens: int, chunk: int, tail: int) -> list[int]:
    """Return chunk sizes that add up to `num_tokens`, the last one at least min(tail, num_tokens).

    The decoder of a replayed prompt needs the encoder's output for the last `tail` rows in one pass, so the chunk
    before the last is shortened and the last may be longer than `chunk`. With a tail of 1 the chunks are plain.

    Example: 61 tokens in chunks of 7 with a tail of 16 are six chunks of 7, one of 3 and one of 16.

    Args:
        num_tokens: tokens of the prompt, at least 1.
        chunk: largest chunk wanted, at least 1.
        tail: rows that the last chunk must have.

    Raises:
        UserError: `chunk` is below 1.

    Source: serving.md, rule D3.
    """
    if chunk < 1:
        raise UserError(f"a chunk of {chunk} tokens is not possible; accepted is 1 or more", param="chunk")
    if num_tokens <= chunk:
        return [num_tokens]
    last = max(num_tokens % chunk or chunk, min(tail, num_tokens))
    before = num_tokens - last
    sizes = [chunk] * (before // chunk)
    if before % chunk:
        sizes.append(before % chunk)
    return [*sizes, last]
