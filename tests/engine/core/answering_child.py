"""Answers prompts with an engine over a directory until it is killed: `python -m ... DIR`.

For every line on standard input, which says with which number to begin, a process is forked that does so; everything is
imported before, so that many may be killed in a short time.
"""

import os
import sys

from tests.engine.core.serving import answer, core, params, prompt


def asked(number: int) -> list[int]:
    """Prompt number so and so: a beginning that every fourth has, and a block of its own."""
    return [*prompt(260, number % 4), *prompt(130, 100 + number)]


def answer_on(folder: str, number: int) -> None:
    engine = core(cache_dir=folder, min_free_disk=0, window_policy="full", is_audited=False)
    while True:
        answer(engine, asked(number), params(max_tokens=2), str(number))
        _tell(f"answered {number}")
        number += 1


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answer_on(sys.argv[1], int(line))
        _tell(f"pid {child}")
        os.waitpid(child, 0)
        _tell("ended")


def _tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one call, so that lines of two processes never mix


if __name__ == "__main__":
    main()
