"""Answers prompts with the engine `ftllm`; `ftllm_peer` starts it with the interpreter that has it.

Runs as a file of its own and imports nothing of headrace. Prints its version when the model is loaded. A line of JSON
{"ids": [...], "count": N} is answered by one line: greedy token ids, and wall and CPU seconds after each.
"""

import ctypes
import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def answer(lib: Any, model: Any, ids: list[int], count: int) -> dict[str, Any]:
    """Generate `count` tokens and say when each was there."""
    stops = model.stop_token_ctypes(None)
    wall, cpu = time.perf_counter(), time.process_time()
    prompt = (ctypes.c_int * len(ids))(*ids)
    sampling = (False, 1.0, 1, 1.0, 1.0, False)  # greedy, no penalty, no logits
    handle = lib.launch_response_llm_model(model.model, len(ids), prompt, count, count, *sampling, *stops)
    found: dict[str, Any] = {"ids": [], "wall": [], "cpu": []}
    while (token := lib.fetch_response_llm_model(model.model, handle)) > -1:
        found["ids"].append(token)
        found["wall"].append(time.perf_counter() - wall)
        found["cpu"].append(time.process_time() - cpu)
    return found


def main(folder: str, threads: str) -> None:
    """Load a checkpoint folder and answer until standard input ends."""
    told = os.dup(1)
    os.dup2(2, 1)  # the library prints progress to standard output
    llm = importlib.import_module("ftllm.llm")
    llm.set_cpu_threads(int(threads))
    model = llm.model(folder, dtype="bfloat16")
    os.write(told, f"{version('ftllm')}\n".encode())
    for line in sys.stdin:
        asked = json.loads(line)
        found = answer(llm.fastllm_lib, model, asked["ids"], asked["count"])
        os.write(told, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # its threads never end by themselves
