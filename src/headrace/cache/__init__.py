"""Bytes that one sequence remembers: packed global entries, window rings, waiting pairs. No model knowledge."""
