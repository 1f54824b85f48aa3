"""Scripts that measure; each runs as `python -m benchmarks.NAME` at the root of the checkout."""
