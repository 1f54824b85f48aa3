"""Capacity planner: what a configuration asks of memory, disk and bandwidth, and the ledger of the reports' figures.

Pure arithmetic on configurations. Nothing here loads torch; `measure` runs a model in the engine's own process.
"""
