"""Measures what verifying and guessing take on this machine, for the cost table of drafting."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import UserError
from headrace.engine.core.dspark import DSpark
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.cost_table import (
    CostKey,
    CostTable,
    cached_cost_table,
    default_path,
    measure,
    read_cost_table,
)
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41

_BATCHES = (1, 4, 16)
_REPEATS, _MOST_REPEATS = 2, 7
_FAST_S = 0.01  # a step that short is measured more often: it is noisier, and costs little
_SLOW_S = 0.5


def cost_table(model: DeepseekV41, drafter: DSpark, namespace: Mapping[str, str], num_slots: int) -> CostTable | None:
    """Return the table of this machine, model and numerics; measured (a second or so) where no file has it.

    None for a model so slow that measuring would hold up the start: then experience alone decides.
    """
    name = hashlib.sha256(json.dumps(dict(namespace), sort_keys=True).encode()).hexdigest()[:16]
    key = CostKey(hardware=_hardware(), model=name, numerics=model.numerics.name)
    try:
        return read_cost_table(default_path(key), key)
    except UserError:
        began = time.perf_counter()
        model.forward([Span(model.new_state(), np.zeros(1, dtype=np.int64), 1)])
        took = time.perf_counter() - began
        if took > _SLOW_S:
            return None
    repeats = _MOST_REPEATS if took < _FAST_S else _REPEATS
    table, _ = cached_cost_table(default_path(key), key, lambda: _measure(model, drafter, num_slots, repeats))
    return table


def _hardware() -> str:
    threads = torch.get_num_threads()
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()} cores, {threads} threads, {torch.__version__}"


def _measure(model: DeepseekV41, drafter: DSpark, num_slots: int, repeats: int) -> CostTable:
    config = model.config
    batches = tuple(size for size in _BATCHES if size <= max(1, num_slots))
    count = min(config.window, max(1, config.max_positions - drafter.max_guesses - 1))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, count)
    states = [_started(model, drafter, ids) for _ in range(batches[-1])]

    def verify(batch: int, guesses: int) -> None:
        rows = np.resize(ids, guesses + 1)
        spans = [Span(state, rows, guesses + 1) for state in states[:batch]]
        model.forward(spans, logit_rows=[guesses + 1] * batch, wants_taps=True)
        for state in states[:batch]:
            state.rollback(count)

    def draft(batch: int) -> None:
        params = SamplingParams()
        sampler = SamplerState(
            params, ids, seed=0, eos_token_id=config.eos_token_id, vocab_size=config.vocab_size, matcher=None
        )
        drafter.propose([_wanted(state, sampler, drafter.max_guesses) for state in states[:batch]])

    most = drafter.max_guesses
    guesses = tuple(dict.fromkeys((0, 1, (most + 1) // 2, most)))
    return measure(verify, draft, batches=batches, guesses=guesses, repeats=repeats)


def _started(model: DeepseekV41, drafter: DSpark, ids: np.ndarray) -> SequenceState:
    state = model.new_state()
    output = model.forward([Span(state, ids, len(ids), is_replay=True)], wants_taps=True)
    drafter.observe([Committed(name="", first=0, token_ids=ids, taps=output.taps, state=state)])
    return state


def _wanted(state: SequenceState, sampler: SamplerState, count: int) -> Wanted:
    return Wanted(name="", token_id=0, count=count, choice=Choice(sampler), state=state)
