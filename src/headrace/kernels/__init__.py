"""Row-invariant tensor operations on PyTorch; no model knowledge, no state."""
