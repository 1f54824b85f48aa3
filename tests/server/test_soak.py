"""Many clients at once, most of whom do not behave: those who do are answered, and memory stays as it was."""

import asyncio
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.serving import Served, serving

ANSWER_S = 60.0
CLIENTS = 64
BODY = {"max_tokens": 8, "stream": True, "ignore_eos": True}
FLAT_BYTES = 24 << 20  # allocators keep a little of the largest crowd; a leak of one request's things is far more
LIBRARY_BYTES = 192 << 20  # of the plan: PyTorch keeps products of shapes it meets, which takes more than some seconds


@dataclass
class Crowd:
    """Clients of one server until a moment, and what became of them."""

    port: int
    until: float
    answered: int = 0
    refused: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)

    async def client(self, seed: int) -> None:
        """Come back again and again, each time in one of four ways."""
        pick = random.Random(seed)
        await asyncio.sleep(pick.random() * 0.2)
        while time.monotonic() < self.until:
            way = pick.choice([self._behave, self._behave, self._vanish, self._stall, self._connect])
            try:
                await asyncio.wait_for(way(pick), ANSWER_S)
            except (TimeoutError, OSError, ValueError, AssertionError) as error:
                self.errors.append(f"{way.__name__}: {error!r}")
            await asyncio.sleep(pick.random() * 0.05)

    async def _open(self, pick: random.Random, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        prompt = [5 + pick.randrange(3000) for _ in range(pick.choice([3, 40, 200]))]
        data = json.dumps({"prompt": prompt, **BODY, **more}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def _behave(self, pick: random.Random) -> None:
        reader, writer = await self._open(pick)
        answer = await reader.read(-1)
        writer.close()
        if answer.startswith(b"HTTP/1.1 429"):
            self.refused += 1
            assert b"retry-after" in answer
            return
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert b'"finish_reason":"length"' in answer
        assert b"data: [DONE]" in answer
        self.answered += 1

    async def _vanish(self, pick: random.Random) -> None:
        reader, writer = await self._open(pick, max_tokens=400)
        await reader.read(pick.choice([1, 400]))
        writer.transport.abort()
        self.left += 1

    async def _stall(self, pick: random.Random) -> None:
        _, writer = await self._open(pick, max_tokens=60)
        await asyncio.sleep(pick.random())
        writer.close()
        self.left += 1

    async def _connect(self, pick: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        if pick.random() < 0.5:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        await asyncio.sleep(pick.random() * 0.3)
        writer.close()
        self.left += 1


def crowd(served: Served, seconds: float, seed: int) -> Crowd:
    found = Crowd(int(served.base_url.rsplit(":", 1)[1]), time.monotonic() + seconds)

    async def all_of_them() -> None:
        await asyncio.gather(*(found.client(seed * 1000 + place) for place in range(CLIENTS)))

    with ThreadPoolExecutor(1) as apart:  # a browser of another test may have left a loop in this thread
        apart.submit(lambda: asyncio.run(all_of_them())).result()
    return found


def memory(served: Served) -> tuple[int, int]:
    """Return the resident bytes of server and engine."""
    page = os.sysconf("SC_PAGE_SIZE")
    pids = (served.process.pid, served.engine_pid)
    server, engine = (int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page for pid in pids)
    return server, engine


def requests_left(served: Served) -> int:
    lines = httpx2.get(f"{served.base_url}/metrics", timeout=30).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("headrace:requests{")))


def soak(first_s: float, then_s: float, engine_bytes: int) -> None:
    """Let a crowd in, note the memory, let it in for longer, and compare; the engine may grow by `engine_bytes`."""
    with serving("--slots", "8", "--max-waiting", "48", "--max-context", "2048") as served:
        crowd(served, first_s, seed=1)
        before = memory(served)
        found = crowd(served, then_s, seed=2)
        deadline = time.monotonic() + 20
        while requests_left(served):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        after = memory(served)
        grown = [new - old for new, old in zip(after, before, strict=True)]
        print(f"answered {found.answered}, told to wait {found.refused}, left {found.left}; bytes grown {grown}")
        assert found.errors == []
        assert found.answered > CLIENTS / 8
        assert grown[0] < FLAT_BYTES, grown
        assert grown[1] < engine_bytes, grown
        assert "Traceback" not in served.log
        assert httpx2.get(f"{served.base_url}/ready").status_code == 200


def test_a_crowd_for_some_seconds() -> None:
    soak(2, 3, LIBRARY_BYTES)


@pytest.mark.full
def test_a_crowd_for_three_minutes() -> None:
    soak(60, 180, FLAT_BYTES)
