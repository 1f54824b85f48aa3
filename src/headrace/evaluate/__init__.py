"""Judges a trained checkpoint: bits per byte, retrieval, drafting, pool, n-gram memory; each with a control."""
