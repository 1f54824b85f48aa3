"""An engine core inside the test's process, requests for it, and what the plain model answers alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from headrace.core.errors import HeadraceError
from headrace.engine.core.core import EngineCore
from headrace.engine.core.drafts import Drafting
from headrace.engine.core.events import ErrorEvent, Event, TokenEvent
from headrace.engine.core.memory_plan import Measured, plan_memory
from headrace.engine.core.options import EngineOptions
from headrace.engine.result import Result
from headrace.engine.sampling.logprobs import log_probability
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import sample
from headrace.engine.sampling.state import SamplerState
from headrace.engine.submission import Submission
from headrace.engine.threads import Threads
from headrace.kernels.native.choice import wanted_kernels
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.model import DeepseekV41
from tests.traces import FOUR_STREAMS, synthetic

GREEDY = {"temperature": 0.0, "seed": 1}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}


def tiny(shape: str | None = None) -> DeepseekV41:
    """The tiny model on the kernels that the environment asks for."""
    kernels = wanted_kernels(None)
    return synthetic(shape or ("three streams" if kernels == "torch" else FOUR_STREAMS), kernels=kernels).model


def prompt(count: int, seed: int = 0) -> list[int]:
    return synthetic("three streams").ids(count, seed).tolist() if count else []


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **GREEDY, **values})


def core(model: DeepseekV41 | None = None, **options: Any) -> EngineCore:
    """An audited engine over the tiny model; four slots and little of everything unless told otherwise."""
    model = tiny() if model is None else model
    threads, drafter = options.pop("threads", 1), options.pop("drafter", None)
    drafting = None if drafter is None else Drafting(drafter, model.config.window)
    chosen = EngineOptions(
        **{"num_slots": 4, "cache_tokens": 4096, "chunk": 64, "snapshot_every": 64, "is_audited": True, **options}
    )
    limit = min(chosen.max_context or model.config.max_positions, model.config.max_positions)
    plan = plan_memory(model.state_shape, chosen, limit, Measured(process=0, weights=0, scratch=0))
    namespace = {"weights": "tiny"}
    return EngineCore(
        model, None, chosen, plan, threads=Threads(threads, threads), namespace=namespace, drafting=drafting
    )


@dataclass
class Client:
    """Submits to a core, steps it, and keeps what it told."""

    core: EngineCore
    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    errors: dict[str, ErrorEvent] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    steps: int = 0

    def submit(self, name: str, ids: Iterable[int], chosen: SamplingParams, submitted: float = 0.0) -> None:
        seed = 0 if chosen.seed is None else chosen.seed
        self.core.submit(
            Submission(
                request_id=name,
                prompt_ids=np.array(list(ids), dtype=np.int64),
                params=chosen,
                seed=seed,
                submitted=submitted,
            )
        )

    def step(self, count: int = 1) -> list[Event]:
        events: list[Event] = []
        for _ in range(count):
            events += self.core.step()
            self.steps += 1
        for event in events:
            self._hear(event)
        return events

    def finish(self, limit: int = 3000) -> None:
        while not self.core.is_idle:
            self.step()
            limit -= 1
            assert limit, "the engine did not come to an end"

    def _hear(self, event: Event) -> None:
        if isinstance(event, ErrorEvent):
            self.errors[event.request_id] = event
        elif isinstance(event, TokenEvent):
            if event.token_id is not None:
                self.tokens.setdefault((event.request_id, event.choice), []).append(event.token_id)
            if event.result is not None:
                self.results.setdefault(event.request_id, {})[event.choice] = event.result


def answer(engine: EngineCore, ids: Iterable[int], chosen: SamplingParams, name: str = "one") -> Result:
    client = Client(engine)
    client.submit(name, ids, chosen)
    client.finish()
    assert not client.errors, client.errors
    return client.results[name][0]


def alone(ids: tuple[int, ...], mode: str = "replay", count: int = 6, **sampling: Any) -> tuple[list[int], list[float]]:
    """What the tiny model says alone, on the kernels that the environment asks for."""
    return _alone(wanted_kernels(None), ids, mode, count, **sampling)


@cache
def _alone(_: str, ids: tuple[int, ...], mode: str, count: int, **sampling: Any) -> tuple[list[int], list[float]]:
    return alone_on(tiny(), ids, params(max_tokens=count, **sampling), mode)


def alone_on(
    model: DeepseekV41, ids: tuple[int, ...], chosen: SamplingParams, mode: str = "replay"
) -> tuple[list[int], list[float]]:
    """What a plain model says alone, in one chunk, with buffers of its own: tokens and log-probabilities."""
    config = model.config
    sampler = SamplerState(
        chosen,
        ids,
        seed=chosen.seed or 0,
        eos_token_id=config.eos_token_id,
        vocab_size=config.vocab_size,
        matcher=None,
    )
    state, tokens, logprobs = model.new_state(), [], []
    rows = len(ids) if mode == "full" else min(len(ids), config.window)
    span = Span(state, np.array(ids), rows, is_replay=mode == "replay")
    for _ in range(chosen.max_tokens):
        logits = model.forward([span]).logits[-1]
        token_id = sample(logits, sampler)
        sampler.accept(token_id)
        tokens.append(token_id)
        logprobs.append(log_probability(logits, token_id))
        span = Span(state, np.array([token_id]), 1)
    return tokens, logprobs


def said(result: Result) -> tuple[list[int], list[float]]:
    return result.token_ids, result.logprobs or []


def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def refusal(engine: EngineCore, ids: Iterable[int], chosen: SamplingParams) -> str:
    try:
        Client(engine).submit("refused", ids, chosen)
    except HeadraceError as error:
        return error.message
    raise AssertionError("nothing was refused")
