"""Who may call, how much may come, and what the answers and the log give away."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from tests.server.inside import Inside
from tests.server.serving import Served, serving
from tests.server.wire import post, read_until


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """Serve with little of everything, for two tenants, to pages of one origin."""
    options = ["--api-key", "one", "--api-key", "two", "--max-body", "2000", "--slots", "1", "--max-waiting", "1"]
    options += [
        "--max-context",
        "512",
        "--request-timeout",
        "1",
        "--cors-origin",
        "https://pages.example",
        "--log-prompts",
    ]
    with serving(*options, api_key="one") as found:
        yield found


def connected(found: Inside) -> socket.socket:
    return socket.create_connection(("127.0.0.1", found.port), timeout=10)


def complete(base_url: str, key: str = "", headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
    found = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": "import os", "max_tokens": 1, **body}
    return httpx2.post(f"{base_url}/v1/completions", json=body, headers=found | (headers or {}), timeout=60)


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ["", "wrong", "test-key2", "test-ke", "tést"])
def test_a_request_without_an_accepted_key_is_refused(served: Served, key: str) -> None:
    headers = {"x-api-key": key.encode()} if key else {}
    answer = complete(served.base_url, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", [{"authorization": "Bearer test-key"}, {"x-api-key": "test-key"}])
def test_both_ways_of_sending_a_key_are_accepted(served: Served, header: dict[str, str]) -> None:
    assert complete(served.base_url, headers=header).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/openapi.json"])
def test_what_tells_nothing_of_a_prompt_needs_no_key(served: Served, path: str) -> None:
    assert httpx2.get(served.base_url + path).status_code == 200


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/abort_request", "/tokenize", "/detokenize"])
def test_everything_else_needs_one(served: Served, path: str) -> None:
    assert httpx2.post(served.base_url + path, json={}).status_code == 401


def test_an_unknown_path_is_named_only_to_those_with_a_key(served: Served) -> None:
    assert httpx2.get(f"{served.base_url}/v1/nothing").status_code == 401
    answer = httpx2.get(f"{served.base_url}/v1/nothing", headers=served.headers)
    assert answer.status_code == 404
    assert "/v1/nothing" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["body", "query", "path"])
def test_a_field_of_any_name_is_refused_by_it(opened: Inside, name: str) -> None:
    assert complete(opened.base_url, **{name: 1}).json()["error"]["param"] == name


def test_head_is_get_without_a_body(opened: Inside) -> None:
    for path in ("/", "/health", "/v1/models"):
        head, whole = httpx2.head(opened.base_url + path), httpx2.get(opened.base_url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert httpx2.head(f"{opened.base_url}/v1/completions").status_code == 405


def test_errors_have_the_shape_of_the_dialect(served: Served) -> None:
    answer = httpx2.post(f"{served.base_url}/v1/messages", json={})
    assert (answer.status_code, answer.json()["type"]) == (401, "error")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["request-id"].startswith("req_")


# -------------------------------------------------------------------------------------------------------------- origins


def test_another_host_name_is_refused_where_no_key_protects(opened: Inside) -> None:
    answer = httpx2.get(f"{opened.base_url}/health", headers={"host": "rebound.example"})
    assert answer.status_code == 403


def test_a_page_of_another_origin_cannot_post(opened: Inside) -> None:
    assert complete(opened.base_url, headers={"origin": "https://evil.example"}).status_code == 403
    assert complete(opened.base_url, headers={"origin": opened.base_url}).status_code == 200


def test_a_form_cannot_post_either_and_is_told_why(opened: Inside) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    answer = httpx2.post(f"{opened.base_url}/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "content-type is 'text/plain'; accepted is 'application/json'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] is None


def test_no_origin_is_allowed_by_default(served: Served) -> None:
    answer = httpx2.get(f"{served.base_url}/health", headers={"origin": "https://pages.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_is_told_so_and_another_is_not(strict: Served) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://pages.example", "https://pages.example"), ("https://evil.example", None)):
        answer = httpx2.options(f"{strict.base_url}/v1/completions", headers={"origin": origin, **ask})
        assert answer.headers.get("access-control-allow-origin") == allowed
    done = complete(strict.base_url, "one", headers={"origin": "https://pages.example"})
    assert (done.status_code, done.headers["access-control-allow-origin"]) == (200, "https://pages.example")


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_large_body_is_refused_by_its_length_and_while_it_comes(strict: Served) -> None:
    answer = complete(strict.base_url, "one", prompt="x" * 3000)
    assert answer.status_code == 413
    assert "accepted are 2,000" in answer.json()["error"]["message"]

    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    answer = httpx2.post(f"{strict.base_url}/v1/completions", content=parts(), headers=strict.headers)
    assert answer.status_code == 413


def test_a_prompt_beyond_the_context_is_refused_with_its_numbers(strict: Served) -> None:
    answer = complete(strict.base_url, "one", prompt=[5] * 600)
    assert answer.status_code == 400
    assert "600 tokens" in answer.json()["error"]["message"]
    assert "512" in answer.json()["error"]["message"]


def test_one_request_too_many_is_told_when_to_come_back(opened: Inside) -> None:
    body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    links = [post(opened.port, "/v1/completions", body) for _ in range(12)]  # four run, eight wait
    try:
        while opened.state.in_flight < 12:
            time.sleep(0.01)
        answer = complete(opened.base_url)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        assert complete(opened.base_url, stream=True).status_code == 429
    finally:
        for link in links:
            link.close()
    opened.until_idle()
    assert complete(opened.base_url).status_code == 200


def test_a_request_that_takes_too_long_ends_with_what_there_is(strict: Served) -> None:
    answer = complete(strict.base_url, "one", max_tokens=500, ignore_eos=True)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 500


def test_a_request_that_is_never_started_in_time_is_refused(strict: Served) -> None:
    port = int(strict.base_url.rsplit(":", 1)[1])
    body = {"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
    with post(port, "/v1/completions", body, key="one") as link:
        assert b'"text"' in read_until(link, b'"text"')
        answer = complete(strict.base_url, "one", max_tokens=1)
    assert answer.status_code in {200, 503}  # the one before may be over in time on a fast machine
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] == "timeout"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(hasty: Inside) -> None:
    with connected(hasty) as link:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
        assert read_until(link, b"\r\n\r\n").startswith(b"HTTP/1.1 408")


def test_a_client_that_asks_for_nothing_is_hung_up_on(hasty: Inside) -> None:
    with connected(hasty) as silent, connected(hasty) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(3):
            time.sleep(0.05)
            slow.sendall(b"X: 1\r\n")
        assert silent.recv(1) == slow.recv(1) == b""
    with connected(hasty) as again:
        for _ in range(2):  # a connection that is used is not
            again.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert read_until(again, b"}").startswith(b"HTTP/1.1 200")
            time.sleep(0.4)


def test_one_connection_too_many_is_told_when_to_come_back(hasty: Inside) -> None:
    with ExitStack() as stack:
        kept = [stack.enter_context(connected(hasty)) for _ in range(hasty.state.settings.max_connections)]
        for link in kept:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert read_until(link, b"}").startswith(b"HTTP/1.1 200")
        answer = httpx2.get(f"{hasty.base_url}/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
    while httpx2.get(f"{hasty.base_url}/health").status_code == 503:
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------- salts


def test_tenants_do_not_see_each_others_cached_prompts(strict: Served) -> None:
    prompt = list(range(300, 600))

    def cached(key: str, **body: Any) -> int:
        answer = complete(strict.base_url, key, prompt=prompt, **body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 200
    assert cached("two") == 0
    assert cached("two") > 200
    assert cached("one", cache_salt="a") == 0
    assert cached("one", cache_salt="a") > 200
    assert cached("two", cache_salt="a") == 0


def test_tenants_do_not_see_each_others_x_rays(strict: Served) -> None:
    path = f"{strict.base_url}/v1/xray/{complete(strict.base_url, 'one', xray=True, cache_salt='a').json()['id']}"
    seen = [httpx2.get(path, headers={"x-api-key": key}).status_code for key in ("one", "two")]
    assert seen == [200, 404]


# ---------------------------------------------------------------------------------------------------------------- leaks


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "seed": 1e400}',
        b"[" * 9000,
    ],
)
def test_a_body_that_is_no_request_is_a_400_with_one_sentence(served: Served, content: bytes) -> None:
    headers = {**served.headers, "content-type": "application/json"}
    answer = httpx2.post(f"{served.base_url}/v1/completions", content=content, headers=headers)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400, message
    assert "Traceback" not in message
    assert "/" not in message.replace("/openapi.json", "")


def test_log_lines_hold_ids_and_counts_but_no_prompt(served: Served) -> None:
    answer = complete(served.base_url, "test-key", prompt="a very secret prompt", user="somebody")
    line = next(line for line in log_with(served, answer.json()["id"]).splitlines() if answer.json()["id"] in line)
    assert "POST /v1/completions 200" in line
    assert f"prompt_tokens={answer.json()['usage']['prompt_tokens']}" in line
    assert "completion_tokens=1" in line
    assert "secret" not in served.log
    assert "test-key" not in served.log


def test_prompts_are_logged_where_that_is_asked_for(strict: Served) -> None:
    complete(strict.base_url, "one", prompt="a prompt\nof two lines")
    assert log_with(strict, 'prompt="a prompt\\nof two lines"')


def log_with(server: Served, text: str) -> str:
    """Return the log as soon as it holds a text: a line may come after its answer; empty where it does not come."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if text in server.log:
            return server.log
        time.sleep(0.02)
    return ""
