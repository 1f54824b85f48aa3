"""The engine in a process of its own: what crosses between it and the front, its main loop, and its client."""
