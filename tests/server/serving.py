"""`headrace serve` in a process of its own on a free port of this machine."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.architecture.tree import ROOT

START_S = 60.0


@dataclass
class Served:
    """A running server."""

    base_url: str
    api_key: str
    process: "subprocess.Popen[bytes]"
    log_file: Path
    first_line: str
    ready_after_s: float

    @property
    def headers(self) -> dict[str, str]:
        """What a request must carry."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def log(self) -> str:
        """What it wrote to standard error so far."""
        return self.log_file.read_text(encoding="utf-8")

    @property
    def engine_pid(self) -> int:
        """Number of the engine's process, its only child."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if not children:  # a child belongs to the thread that started it
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            children = [child for task in tasks for child in task.read_text(encoding="ascii").split()]
        return int(children[-1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def serving(*options: str, api_key: str = "") -> Iterator[Served]:
    """Start `headrace serve` with options, and end it with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        began = time.monotonic()
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            line = _first_line(process.stdout)
            found = re.search(r"http://\S+", line)
            if found is None:
                raise AssertionError(f"no server came up: {line!r} {log_file.read_text(encoding='utf-8')}")
            took = time.monotonic() - began
            yield Served(found.group(), api_key, process, log_file, line, took)
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _first_line(stdout: IO[bytes]) -> str:
    return stdout.readline().decode()
