"""Drafting: tokens/s with drafts against without, the answers compared token by token.

Runs the engine's core in this process on headrace-nano (or a checkpoint folder with a draft module). Prompts are
held-out Python that ships with the model, the same in which most guesses stay, and random token ids. Bounds: one stream
on held-out Python at least 1.1 times, where three or more guesses a round stay at least 1.4 times, on random ids never
below 0.97 times, eight streams never below 0.98 times.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.core.shipped import shipped_model
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.events import TokenEvent
from headrace.engine.core.options import EngineOptions
from headrace.engine.result import Result
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission
from headrace.text.tokenizer import Tokenizer

from ._measure import Figure, Sample, parser, progress, report

STREAMS = 8
PROMPT, ANSWER = 400, 160
DOCUMENTS = 12
WAYS = ("off", "auto")
MIN_PYTHON, MIN_LUCKY, MIN_RANDOM, MIN_EIGHT = 1.1, 1.4, 0.97, 0.98
LUCKY = 3.0


class Race:
    """Two cores of one checkpoint, one of which drafts; both answer the same prompts in turn."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.cores: dict[str, EngineCore] = {
            way: build_core(
                folder,
                EngineOptions(threads=threads, num_slots=STREAMS, has_prefix_cache=False, drafting=way),  # type: ignore[arg-type]
                None,
                None,
            )
            for way in WAYS
        }

    def run(self, prompts: Sequence[np.ndarray], repetitions: int) -> tuple[list[float], list[Result]]:
        """Return tokens per CPU-second with drafts over without, once per repetition, and the drafted results.

        Raises:
            RuntimeError: an answer differs.
        """
        ratios: list[float] = []
        drafted: list[Result] = []
        for repetition in range(repetitions):
            order = WAYS if repetition % 2 else WAYS[::-1]
            found = {way: decode(self.cores[way], prompts) for way in order}
            (plain_rate, plain), (rate, drafted) = (found[way] for way in WAYS)
            for one, other in zip(plain, drafted, strict=True):
                if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
                    raise RuntimeError("an answer with drafts differs from the one without")
            ratios.append(rate / plain_rate)
        return ratios, drafted


def decode(core: EngineCore, prompts: Sequence[np.ndarray]) -> tuple[float, list[Result]]:
    """Answer prompts together; return tokens per CPU-second from when all are read, and the results."""
    for place, ids in enumerate(prompts):
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=1)
        core.submit(
            Submission(request_id=str(place), prompt_ids=ids, params=params, seed=1, submitted=time.monotonic())
        )
    results: dict[str, Result] = {}
    tokens, began = 0, 0.0
    while not core.is_idle:
        events = [event for event in core.step() if isinstance(event, TokenEvent)]
        results |= {event.request_id: event.result for event in events if event.result is not None}
        tokens += sum(event.token_id is not None for event in events)
        if not began and core.counts["decode"] == len(prompts):
            tokens, began = 0, time.process_time()
    took = Sample(time.process_time() - began, 0.0)
    return tokens / took.cpu_s, [results[str(place)] for place in range(len(prompts))]


def held_out(folder: Path, count: int) -> list[np.ndarray]:
    """Return beginnings of held-out documents, as token ids."""
    tokenizer = Tokenizer.from_file(folder)
    lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return [np.array(ids[:PROMPT], dtype=np.int64) for ids in texts if len(ids) > PROMPT][:count]


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.path or shipped_model()
    race, prompts = Race(folder, args.threads), held_out(folder, DOCUMENTS)
    python: list[float] = []
    lucky: list[float] = []
    accepted: list[float] = []
    for place, ids in enumerate(prompts):
        ratios, (result,) = race.run([ids], 1)
        kept = result.work.drafts_accepted / max(1, result.work.draft_rounds)
        progress(f"document {place}: {ratios[0]:.2f} times, {kept:.2f} guesses a round stayed")
        python += ratios
        accepted.append(kept)
        lucky += ratios if kept >= LUCKY else []
    size = race.cores["off"].model.config.vocab_size
    strange = [np.random.default_rng(seed).integers(size // 8, size - size // 8, PROMPT) for seed in range(4)]
    random = [ratio for ids in strange for ratio in race.run([ids], 1)[0]]
    eight = race.run(prompts[:STREAMS], args.repetitions)[0]
    eight_random = race.run([*strange, *(ids[::-1].copy() for ids in strange)], args.repetitions)[0]
    against = "the same core without drafts, same run"
    figures = [
        Figure("guesses that stay a round, held-out Python", "tokens", accepted, "-"),
        Figure("held-out Python, one stream", "ratio", python, against, bound=MIN_PYTHON, is_floor=True),
        Figure("random ids, one stream", "ratio", random, against, bound=MIN_RANDOM, is_floor=True),
        Figure(f"held-out Python, {STREAMS} streams", "ratio", eight, against, bound=MIN_EIGHT, is_floor=True),
        Figure(f"random ids, {STREAMS} streams", "ratio", eight_random, against, bound=MIN_EIGHT, is_floor=True),
    ]
    if lucky:
        title = f"held-out Python, one stream, where {LUCKY:g} or more stay"
        figures.append(Figure(title, "ratio", lucky, against, bound=MIN_LUCKY, is_floor=True))
    return report("Drafting", args, figures, {"model": folder.name})


if __name__ == "__main__":
    raise SystemExit(main())
