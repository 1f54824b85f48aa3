"""Answers prompts with an engine over a directory until it is killed: `python -m ... DIR`."""

import sys

from tests.engine.core.serving import answer, core, params, prompt


def main() -> None:
    engine = core(cache_dir=sys.argv[1], min_free_disk=0, window_policy="full", is_audited=False)
    number = 0
    while True:
        ids = [*prompt(260, number % 4), *prompt(40, 100 + number)]
        answer(engine, ids, params(max_tokens=2), str(number))
        number += 1
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
