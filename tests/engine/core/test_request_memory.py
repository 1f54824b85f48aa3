"""What live requests weigh is limited, charged once, and given back with their last answer."""

from typing import Any

import numpy as np
import pytest

from headrace.core.errors import CapacityError, OverloadedError
from headrace.engine.core.request_memory import RequestMemory, charge_of, request_budget
from headrace.engine.submission import Submission
from tests.engine.core.serving import Client, core, params, prompt


def submission(name: str, tokens: int, **chosen: Any) -> Submission:
    ids = np.zeros(tokens, dtype=np.int64)
    return Submission(request_id=name, prompt_ids=ids, params=params(**chosen), seed=0, submitted=0.0)


def test_log_probabilities_of_a_prompt_are_charged() -> None:
    plain, told = submission("a", 1000), submission("a", 1000, prompt_logprobs=20)
    assert charge_of(told, 5) - charge_of(plain, 5) == 1000 * (12 + 8 * 20)


def test_alternatives_are_charged_for_every_answer_and_token() -> None:
    plain, told = submission("a", 10), submission("a", 10, top_logprobs=4, n=3)
    assert charge_of(told, 50) - charge_of(plain, 50) == 3 * 50 * (12 + 8 * 4)


def test_a_request_is_refused_while_others_hold_too_much_and_taken_after_their_last_answer() -> None:
    memory = RequestMemory(100_000)
    memory.take(submission("a", 2000, n=2), 5)
    with pytest.raises(OverloadedError, match="try again later"):
        memory.take(submission("b", 2000), 5)
    memory.end_one("a")
    with pytest.raises(OverloadedError):
        memory.take(submission("b", 2000), 5)
    memory.end_one("a")
    assert memory.used == 0
    memory.take(submission("b", 2000), 5)


def test_a_request_that_can_never_fit_is_told_so() -> None:
    with pytest.raises(CapacityError, match=r"need 320,000 bytes; accepted are 100,000"):
        RequestMemory(100_000).take(submission("a", 10_000), 5)


def test_the_longest_request_with_everything_always_fits() -> None:
    for context in (1_000, 1 << 20):
        RequestMemory(request_budget(context)).take(
            submission("a", context, prompt_logprobs=20, max_tokens=1, top_logprobs=20), 1
        )


def test_the_engine_gives_back_what_ended_cancelled_and_refused_requests_held() -> None:
    engine = core(max_waiting=2)
    client = Client(engine)
    client.submit("a", prompt(40), params(n=2))
    client.submit("b", prompt(50), params())
    with pytest.raises(OverloadedError):
        client.submit("c", prompt(50), params())
    client.step(2)
    engine.cancel("b")
    client.finish()
    assert engine._request_memory.used == 0
