"""Streams: they stay alive, they end when nobody reads them, and they say so when the engine dies."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.server.clients import MODEL, anthropic_of, openai_of, user
from tests.server.inside import Inside
from tests.server.serving import Served, serving
from tests.server.wire import post, read_until

LONG = {"max_tokens": 3000, "stream": True, "ignore_eos": True}
LONG_PROMPT = [5 + index % 3000 for index in range(6000)]
MAX_STEPS = 4  # from the client's leaving to the request's end, as many as may pass while the news travels


@pytest.fixture(autouse=True)
def _idle(opened: Inside) -> None:
    """Begin with nothing cached and nothing to do."""
    opened.until_idle()
    opened.llm.clear_cache()


def steps_after(opened: Inside, began: int) -> int:
    """Return the steps with rows of a request that were taken since step `began`."""
    return sum(bool(trace.requests) for trace in opened.llm.traces() if trace.step > began)


def newest_step(opened: Inside) -> int:
    traces = opened.llm.traces()
    return traces[-1].step if traces else -1


# -------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("wants_stream", [True, False])
def test_work_stops_within_steps_when_the_client_leaves_while_tokens_come(opened: Inside, wants_stream: bool) -> None:
    body = {**LONG, "prompt": "x", "stream": wants_stream}
    with post(opened.port, "/v1/completions", body) as link:
        if wants_stream:
            assert b'"text"' in read_until(link, b'"text"')
        while not opened.llm.status()["decode"]:
            time.sleep(0.01)
        began = newest_step(opened)
    opened.until_idle()
    assert steps_after(opened, began) <= MAX_STEPS + 1
    assert opened.state.in_flight == 0


def test_work_stops_within_steps_when_the_client_leaves_while_its_prompt_is_read(opened: Inside) -> None:
    with post(opened.port, "/v1/completions", {**LONG, "prompt": LONG_PROMPT}) as link:
        read = read_until(link, b": reading")
        assert b": reading" in read
        began = newest_step(opened)
    opened.until_idle()
    assert steps_after(opened, began) <= MAX_STEPS
    stops = [step.stop for trace in opened.llm.traces() for step in trace.requests if step.kind == "prefill"]
    assert stops[-1] < len(LONG_PROMPT)


def test_a_request_that_waits_goes_when_its_client_does(opened: Inside) -> None:
    links = [post(opened.port, "/v1/completions", {**LONG, "prompt": "x"}) for _ in range(4)]
    try:
        for link in links:
            read_until(link, b'"text"')
        with post(opened.port, "/v1/completions", {**LONG, "prompt": "y"}):
            while not opened.llm.status()["queued"]:
                time.sleep(0.01)
        deadline = time.monotonic() + 5
        while opened.llm.status()["queued"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert opened.llm.status()["decode"] == 4
    finally:
        for link in links:
            link.close()


def test_several_answers_of_one_request_all_stop(opened: Inside) -> None:
    with post(opened.port, "/v1/completions", {**LONG, "prompt": ["x", "y"], "n": 2}) as link:
        for index in range(4):
            read_until(link, f'"index":{index}'.encode())
        began = newest_step(opened)
    opened.until_idle()
    assert steps_after(opened, began) <= MAX_STEPS


def test_after_all_that_leave_the_books_are_right_and_the_next_is_served(opened: Inside) -> None:
    links = [post(opened.port, "/v1/completions", {**LONG, "prompt": [7 + index] * 300}) for index in range(8)]
    time.sleep(0.3)
    for link in links:
        link.close()
    opened.until_idle()
    opened.llm.audit()
    answer = httpx2.post(f"{opened.base_url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30)
    assert answer.status_code == 200


def test_a_client_that_takes_nothing_counts_as_gone(hasty: Inside) -> None:
    data = json.dumps({**LONG, "prompt": "x", "logprobs": 20}).encode()

    def steps() -> float:
        told = httpx2.get(f"{hasty.base_url}/metrics", timeout=20).text
        line = next(line for line in told.splitlines() if line.startswith("headrace:engine_steps_total"))
        return float(line.split()[-1])

    before = steps()
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", hasty.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while not hasty.alive():
            time.sleep(0.01)
        hasty.until_idle(60)
    assert 0 < steps() - before < 1500  # of 3,000


# ----------------------------------------------------------------------------------------------------------- keep-alive


def test_a_long_prompt_is_accompanied_by_comments_that_say_how_far_it_is_read(opened: Inside) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 2, "stream": True}
    with httpx2.stream("POST", f"{opened.base_url}/v1/completions", json=body, timeout=60) as answer:
        lines = list(answer.iter_lines())
    comments = [line for line in lines if line.startswith(":")]
    read = [int(line.split()[2]) for line in comments if "reading" in line]
    assert len(read) >= 3
    assert read == sorted(read)
    assert 0 < read[-1] < 6000
    assert all(line.endswith("of 6000 tokens") for line in comments if "reading" in line)
    first_text = next(index for index, line in enumerate(lines) if line.startswith("data:"))
    assert not any("reading" in line for line in lines[first_text:])


def test_the_official_client_does_not_see_the_comments(opened: Inside) -> None:
    with openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key="none") as client:
        chunks = list(client.completions.create(model="headrace-nano", prompt=LONG_PROMPT, max_tokens=2, stream=True))
    assert [chunk.object for chunk in chunks] == ["text_completion"] * len(chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------------------ the engine dies


@pytest.fixture(scope="module")
def mortal() -> Iterator[Served]:
    """Serve with an engine that the tests kill; the clients ask for a key."""
    with serving("--api-key", "key", api_key="key") as found:
        yield found


def test_a_killed_engine_is_told_to_streams_and_replaced_within_seconds(mortal: Served) -> None:
    found = mortal
    with openai_of(found) as client, anthropic_of(found) as claude:
        endless: dict[str, Any] = {"stream": True, "extra_body": {"logit_bias": {"1": -100}}, "model": MODEL}
        stream = client.completions.create(prompt="x", max_tokens=3000, **endless)
        response = client.responses.create(input="x", max_output_tokens=3000, **endless)
        message = claude.messages.create(messages=[user("x")], max_tokens=3000, **endless)
        for one in (stream, response, message):
            next(iter(one))
        first = found.engine_pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_down"
        assert "exit" not in caught.value.message
        events = list(response)  # OpenAI's client gives this dialect's error as an event
        assert (events[-1].type, events[-1].code) == ("error", "engine_down")
        assert events[-1].sequence_number == len(events)
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            list(message)
        began = time.monotonic()
        answer = client.completions.create(model="headrace-nano", prompt="x", max_tokens=2)
        took = time.monotonic() - began
        assert answer.choices[0].finish_reason == "length"
        assert took < max(5.0, 1.5 * found.ready_after_s), took  # a busy machine is slow at starting anything
        print(f"the next request was answered {took:.2f} s after the engine was killed")
        assert found.engine_pid != first
        metrics = httpx2.get(f"{found.base_url}/metrics").text
        assert 'headrace:requests_failed_total{model_name="headrace-nano",status="503"} 3.0' in metrics


def test_an_engine_that_is_given_up_is_a_503_with_retry_after(mortal: Served) -> None:
    def complete() -> httpx2.Response:
        body = {"prompt": "x", "max_tokens": 1}
        return httpx2.post(f"{mortal.base_url}/v1/completions", json=body, headers=mortal.headers, timeout=60)

    deadline = time.monotonic() + 55
    while (answer := complete()).status_code == 200 and time.monotonic() < deadline:
        os.kill(mortal.engine_pid, signal.SIGKILL)
        time.sleep(0.05)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx2.get(f"{mortal.base_url}/health").status_code == 200
    assert httpx2.get(f"{mortal.base_url}/ready").status_code == 503
    assert "headrace:engine_up{" in httpx2.get(f"{mortal.base_url}/metrics", timeout=20).text


# ---------------------------------------------------------------------------------------------------------------- abort


def test_abort_ends_a_stream_with_an_error_event(opened: Inside) -> None:
    with post(opened.port, "/v1/completions", {**LONG, "prompt": "x"}) as link:
        head = read_until(link, b'"text"')
        name = json.loads(head[head.index(b'{"id"') : head.index(b',"object"')] + b"}")["id"]
        answer = httpx2.post(f"{opened.base_url}/abort_request", json={"request_id": name})
        assert (answer.status_code, answer.json()["ended"]) == (200, 1)
        rest = read_until(link, b"[DONE]")
    assert b'"code":"aborted"' in rest
    opened.until_idle()
    assert httpx2.post(f"{opened.base_url}/abort_request", json={"request_id": name}).status_code == 404


def test_abort_all_ends_a_request_that_is_no_stream(opened: Inside) -> None:
    found: list[httpx2.Response] = []
    body = {**LONG, "prompt": "x", "stream": False}
    thread = threading.Thread(
        target=lambda: found.append(httpx2.post(f"{opened.base_url}/v1/completions", json=body, timeout=60))
    )
    thread.start()
    while not opened.alive():
        time.sleep(0.01)
    assert httpx2.post(f"{opened.base_url}/abort_request", json={"abort_all": True}).json()["ended"] == 1
    thread.join(10)
    assert found[0].status_code == 409
    opened.until_idle()


def test_a_reset_cache_is_empty(opened: Inside) -> None:
    prompt = list(range(100, 500))
    body = {"prompt": prompt, "max_tokens": 1}
    url = f"{opened.base_url}/v1/completions"
    httpx2.post(url, json=body, timeout=60)
    assert httpx2.post(url, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert httpx2.post(f"{opened.base_url}/reset_prefix_cache?reset_external=true").status_code == 200
    assert httpx2.post(url, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
