"""Times decode steps and a prefill of one checkpoint, as it is told on standard input; `headrace bench` starts it.

Runs as a file of its own, with whatever `headrace` is on the path: the version to compare with need not know it. A
line `decode STREAMS STEPS` or `prefill TOKENS` is answered by one line of JSON: CPU and wall seconds per sample.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics

CONTEXT = 64
CHUNK = 256


class Worker:
    """One loaded model and the sequences that decode."""

    def __init__(self, model: DeepseekV41) -> None:
        self._model = model
        self._random = np.random.default_rng(0)
        self._states: dict[int, list[Any]] = {}

    def answer(self, words: list[str]) -> list[tuple[float, float]]:
        """Do what a line asks for."""
        if words[0] == "decode":
            return self._decode(int(words[1]), int(words[2]))
        return self._prefill(int(words[1]))

    def _ids(self, count: int) -> np.ndarray:
        return self._random.integers(3, self._model.config.vocab_size - 8, count)

    def _decode(self, streams: int, steps: int) -> list[tuple[float, float]]:
        if streams not in self._states:
            states = [self._model.new_state() for _ in range(streams)]
            for state in states:
                self._model.forward([Span(state, self._ids(CONTEXT), CONTEXT)])
            self._states[streams] = states
            self._step(streams)
        return [_timed(lambda: self._step(streams)) for _ in range(steps)]

    def _step(self, streams: int) -> None:
        self._model.forward([Span(state, self._ids(1), 1) for state in self._states[streams]])

    def _prefill(self, tokens: int) -> list[tuple[float, float]]:
        state = self._model.new_state()

        def read() -> None:
            for low in range(0, tokens, CHUNK):
                count = min(CHUNK, tokens - low)
                self._model.forward([Span(state, self._ids(count), count)])

        return [_timed(read)]


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def main(path: str, kernels: str, threads: str) -> None:
    """Load and answer until standard input ends; `kernels` is empty for a version without native kernels."""
    torch.set_num_threads(int(threads))
    options = LoadOptions(numerics=Numerics(kernels=kernels) if kernels else Numerics())
    worker = Worker(load_model(Path(path), options).model)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(worker.answer(line.split())) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
