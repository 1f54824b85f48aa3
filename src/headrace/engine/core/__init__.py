"""The engine's loop: one step after another, for all requests at once. Runs in one thread of one process."""
