"""`headrace serve` comes up, says so in one line, and ends when it is told to."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.server.serving import Served, serving
from tests.server.wire import post, read_until


def refusal(*options: str) -> str:
    """Return the one line with which `headrace serve` refuses its options."""
    command = [sys.executable, "-m", "headrace", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def test_one_line_says_what_is_served_where(served: Served) -> None:
    assert served.first_line == f"headrace serves headrace-nano at {served.base_url}\n"
    assert served.base_url.startswith("http://127.0.0.1:")


def test_a_server_that_says_it_is_ready_has_decoded_a_token(served: Served) -> None:
    answer = httpx2.get(f"{served.base_url}/ready")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ready"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0_and_streams_are_told(number: int) -> None:
    with serving() as found:
        port, engine = int(found.base_url.rsplit(":", 1)[1]), found.engine_pid
        body = {"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with post(port, "/v1/completions", body) as link:
            assert b'"text"' in read_until(link, b'"text"')
            status = found.stop(number)
            rest = read_until(link, b"no such thing")
        assert status == 0
        assert b'"code":"stopping"' in rest
        assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip()) or b"data: [DONE]" in rest
        assert found.process.stdout.read() == b""
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(_open(engine), 0)


def _open(pid: int) -> int:
    import os

    return os.pidfd_open(pid)


def test_a_cache_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    assert f"cannot use {file} as a cache" in refusal("--cache-dir", str(file))


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in refusal("--port", str(port))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--api-key", " "], "an API key is empty"),
        (["--api-key", "a", "--api-key", "a"], "given twice"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--request-timeout", "0"], "request_timeout_s is 0"),
        (["--cors-origin", "example.org"], "example.org"),
        (["--max-memory", "1000", "--port", "0"], "memory"),
        (["/no/such/model", "--port", "0"], "/no/such/model"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options: list[str], word: str) -> None:
    assert word in refusal(*options)


def test_the_servers_own_modules_load_no_torch() -> None:
    code = "import sys, headrace.server.app, headrace.server.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
