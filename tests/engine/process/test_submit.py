"""One request at a time, without waiting: what a server needs of the front."""

import os
import signal
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.core.errors import EngineError, UserError
from headrace.engine.core.events import PrefillEvent, TokenEvent
from headrace.engine.core.totals import Totals
from headrace.engine.llm import LLM
from headrace.engine.sampling.params import SamplingParams

PROMPT = [3 + index % 50 for index in range(40)]


def told(queue: "SimpleQueue[Any]") -> list[Any]:
    """Return what is told of a request up to its result or its error."""
    found = []
    while True:
        found.append(queue.get(timeout=60))
        if isinstance(found[-1], EngineError) or getattr(found[-1], "result", None) is not None:
            return found


def test_a_submitted_request_is_told_event_by_event_and_is_the_same_answer(folder: Path) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1, temperature=1.0)
    with LLM(folder) as llm:
        queue: SimpleQueue[Any] = SimpleQueue()
        name = llm.submit(llm.encode(PROMPT), params, queue.put)
        events = told(queue)
        (expected,) = llm.generate([PROMPT], params)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert all(isinstance(event, TokenEvent | PrefillEvent) for event in events)
    assert {event.request_id for event in events} == {name}
    assert [event.token_id for event in tokens] == expected.token_ids
    assert tokens[-1].result.token_ids == expected.token_ids


def test_a_cancelled_request_ends_and_is_told_so(folder: Path) -> None:
    with LLM(folder) as llm:
        queue: SimpleQueue[Any] = SimpleQueue()
        name = llm.submit(llm.encode(PROMPT), SamplingParams(max_tokens=1500, ignore_eos=True), queue.put)
        queue.get(timeout=60)
        llm.cancel(name)
        events = told(queue)
        assert events[-1].result.finish_reason == "cancelled"
        assert llm.status()["decode"] == 0


def test_a_refused_parameter_is_refused_at_once(folder: Path) -> None:
    with LLM(folder) as llm, pytest.raises(UserError, match="not in the vocabulary"):
        llm.submit(llm.encode(PROMPT), SamplingParams(stop_token_ids=[10**6]), print)


def test_questions_are_answered_without_waiting_and_over_a_restart(folder: Path) -> None:
    with LLM(folder) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))
        queue: SimpleQueue[Any] = SimpleQueue()
        llm.ask("totals", queue.put)
        status, totals = queue.get(timeout=60)
        assert status == {
            **llm.status(),
            "resident_bytes": status["resident_bytes"],
            "peak_bytes": status["peak_bytes"],
        }
        assert isinstance(totals, Totals)
        assert (totals.generated_tokens, totals.prompt_tokens) == (3, 40)
        assert llm.is_up
        assert not llm.is_starting
        os.kill(status["pid"], signal.SIGKILL)
        while llm.is_up:
            time.sleep(0.001)
        assert llm.is_starting
        llm.ask("totals", queue.put)  # waits for the next process
        assert queue.get(timeout=60)[1].generated_tokens == 0
        assert llm.is_up
    assert not llm.is_up
