"""Decides what each step computes: who runs, who waits and why, who is swapped. Pure planning, no tensors, no clock."""
