"""What HTTP costs: eight streams through `headrace serve` against the same through `LLM`, on headrace-nano.

Both have an engine process of their own and answer the same prompts in turn. Bounds: the streams take at most 5 %
longer over HTTP, from the first request to the last token; the server's process takes at most 5 % of the engine's CPU
time, which says the same on a machine that others use too.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace import LLM, SamplingParams

from ._measure import Figure, parser, progress, report

STREAMS = 8
TOKENS = 128
PROMPT = 24
MAX_OVERHEAD = 0.05


@contextmanager
def server(path: Path | None, threads: int) -> Iterator[tuple[int, int]]:
    """Serve on a free port of this machine; give the port and the server's process."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--threads", str(threads)]
    command += ["--slots", str(STREAMS), *([str(path)] if path else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            if found is None:
                raise SystemExit("the server did not come up")
            yield int(found.group(1)), process.pid
        finally:
            process.terminate()
            process.wait(30)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    """Return the engine's process, the only child of a server."""
    children = [part.read_text(encoding="ascii").split() for part in Path(f"/proc/{pid}/task").glob("*/children")]
    (engine,) = (int(child) for found in children for child in found)
    return engine


def prompts(size: int) -> list[list[int]]:
    """Return ordinary token ids, one list a stream."""
    made = np.random.default_rng(1).integers(size // 8, size - size // 8, (STREAMS, PROMPT))
    return [row.tolist() for row in made]


def directly(llm: LLM, asked: list[list[int]]) -> float:
    """Answer all prompts through `LLM.stream`; return the wall seconds."""
    began = time.perf_counter()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, logprobs=False)
    for _ in llm.stream(asked, params):
        pass
    return time.perf_counter() - began


def over_http(port: int, asked: list[list[int]]) -> float:
    """Answer them as streams over HTTP; return the wall seconds."""

    async def one(prompt: list[int]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "temperature": 0}
        data = json.dumps({**body, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read(-1)
        writer.close()
        if b"data: [DONE]" not in answer:
            raise SystemExit(f"the server answered {answer[:200]!r}")

    async def all_of_them() -> None:
        await asyncio.gather(*(one(prompt) for prompt in asked))

    began = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - began


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    made.set_defaults(repetitions=6)
    args = made.parse_args()
    plain, http, cpu, shares = [], [], [], []
    with LLM(args.path, threads=args.threads, num_slots=STREAMS) as llm, server(args.path, args.threads) as (port, pid):
        asked, engine = prompts(llm.config.vocab_size), engine_of(pid)
        directly(llm, asked)
        over_http(port, asked)
        for repetition in range(args.repetitions):
            is_first = repetition % 2 == 0  # who begins changes, so that a drift of the machine's load favours neither
            if is_first:
                plain.append(directly(llm, asked))
            before, decoding = cpu_seconds(pid), cpu_seconds(engine)
            http.append(over_http(port, asked))
            took = cpu_seconds(pid) - before
            cpu.append(1e6 * took / (STREAMS * TOKENS))
            shares.append(took / (cpu_seconds(engine) - decoding))
            if not is_first:
                plain.append(directly(llm, asked))
            progress(f"round {repetition}: {plain[-1]:.2f} s directly, {http[-1]:.2f} s over HTTP")
    overheads = [over / direct - 1 for direct, over in zip(plain, http, strict=True)]
    figures = [
        Figure(f"{STREAMS} streams directly", "s", plain, "-", wall_s=plain),
        Figure(f"{STREAMS} streams over HTTP", "s", http, "-", wall_s=http),
        Figure("longer over HTTP", "share", overheads, "same round", bound=MAX_OVERHEAD),
        Figure("CPU of the server's process", "us a token", cpu, "-"),
        Figure("CPU of the server / CPU of the engine", "share", shares, "same run", bound=MAX_OVERHEAD),
    ]
    return report("HTTP", args, figures, {"tokens": TOKENS, "prompt": PROMPT})


if __name__ == "__main__":
    raise SystemExit(main())
