"""Where a prompt begins when a prefix of it is cached; pure arithmetic.

The decoder is replayed over the last W tokens of every prompt, so the encoder's output is needed for those even where
the cache holds their entries; and a window row is exact only if it is held or if its own window is.
Source: serving.md, rules D4 to D8.
"""


def exact_row(num_tokens: int, matched: int, window: int, step: int) -> int:
    """Return the best first row to compute with exact windows: min(c, N - W), at least 0, a multiple of `step`.

    Args:
        num_tokens: N, tokens of the prompt.
        matched: c, tokens whose entries are cached.
        window: W.
        step: the largest ratio, so that no entry is half done.
    """
    row = max(0, min(matched, num_tokens - window))
    return row - row % step


def replayed_row(num_tokens: int, matched: int, window: int, step: int) -> int:
    """Return the first row to compute when the windows begin empty: W before the match's end, and as `exact_row`."""
    return exact_row(num_tokens, max(0, matched - window), window, step)


def rebuilt_row(num_tokens: int, matched: int, window: int, step: int, layers: int) -> int:
    """Return the first row to compute so that windows which begin empty are exact where they must be; 0: all of them.

    A row of the first layer looks back W - 1 tokens, one of the next as many more: after `layers` (W - 1) tokens the
    last encoder layer's output depends on nothing before the beginning. Until then rows are wrong, and give nothing:
    their entries are in the cache.
    Source: deepseek-v4.md section 12.5, zero SWA caching.
    """
    row = exact_row(num_tokens, matched, window, step) - layers * (window - 1)
    return max(0, row - row % step)
