"""Guess several tokens ahead, keep those that the model would have written itself: faster answers, the same answers."""
