"""Tokens per second with drafts against none, and that both answer the same. A run of its own compares them.

Runs the engine's core in this process on headrace-nano (or a checkpoint folder with a draft module). Prompts are
held-out Python that ships with the model, the same in which most guesses stay, and hostile ones: random token ids
(several lengths of prompt and answer), Python that turns into random ids, temperature 1, short answers. Bounds: one
stream on held-out Python at least 1.1 times, where three or more guesses a round stay at least 1.4 times, no hostile
answer below 0.97 times (the median of its runs), eight streams never below 0.98 times.
"""

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
RANDOM_PROMPTS, RANDOM_ANSWERS, SHORT_ANSWERS = (16, 64, 400, 900), (64, 128, 256), (8, 16, 32)


@dataclass(frozen=True)
class Task:
    """A prompt [T] of token ids, and how its answer is sampled."""

    prompt_ids: np.ndarray
    params: SamplingParams


def task(prompt_ids: np.ndarray, tokens: int = ANSWER, temperature: float = 0.0) -> Task:
    """Return one whose answer has exactly so many tokens."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=1)
    return Task(prompt_ids, params)


class Race:
    """Two cores of one checkpoint, one of which drafts; both answer the same prompts in turn."""

    def __init__(self, folder: Path, threads: int, kernels: str | None) -> None:
        self.cores: dict[str, EngineCore] = {
            way: build_core(
                folder,
                EngineOptions(
                    threads=threads,
                    num_slots=STREAMS,
                    has_prefix_cache=False,
                    drafting=way,  # type: ignore[arg-type]
                    kernels=kernels,
                ),
                None,
                None,
            )
            for way in WAYS
        }

    def run(self, tasks: Sequence[Task], repetitions: int) -> tuple[list[float], list[Result]]:
        """Return tokens per CPU-second with drafts over without, once per repetition, and the drafted results.

        Raises:
            RuntimeError: an answer differs.
        """
        ratios: list[float] = []
        drafted: list[Result] = []
        for repetition in range(repetitions):
            order = WAYS if repetition % 2 else WAYS[::-1]
            found = {way: decode(self.cores[way], tasks) for way in order}
            (plain_rate, plain), (rate, drafted) = (found[way] for way in WAYS)
            for one, other in zip(plain, drafted, strict=True):
                if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
                    raise RuntimeError("an answer with drafts differs from the one without")
            ratios.append(rate / plain_rate)
        return ratios, drafted


def decode(core: EngineCore, tasks: Sequence[Task]) -> tuple[float, list[Result]]:
    """Answer prompts together; return tokens per CPU-second from when all are read, and the results."""
    gc.collect()  # not in the middle of one of them
    for place, one in enumerate(tasks):
        core.submit(
            Submission(
                request_id=str(place),
                prompt_ids=one.prompt_ids,
                params=one.params,
                seed=1,
                submitted=time.monotonic(),
            )
        )
    results: dict[str, Result] = {}
    tokens, began = 0, 0.0
    while not core.is_idle:
        events = [event for event in core.step() if isinstance(event, TokenEvent)]
        results |= {event.request_id: event.result for event in events if event.result is not None}
        tokens += sum(event.token_id is not None for event in events)
        if not began and core.counts["decode"] == len(tasks):
            tokens, began = 0, time.process_time()
    took = Sample(time.process_time() - began, 0.0)
    return tokens / took.cpu_s, [results[str(place)] for place in range(len(tasks))]


def held_out(folder: Path, count: int) -> list[np.ndarray]:
    """Return beginnings of held-out documents, as token ids."""
    tokenizer = Tokenizer.from_file(folder)
    lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return [np.array(ids[:PROMPT], dtype=np.int64) for ids in texts if len(ids) > PROMPT][:count]


def random_ids(seed: int, count: int, size: int) -> np.ndarray:
    """Return ids of words and pieces of them, [count]."""
    return np.random.default_rng(seed).integers(size // 8, size - size // 8, count)


def hostile(python: Sequence[np.ndarray], count: int, size: int) -> dict[str, list[Task]]:
    """Return tasks that drafting is likely to lose, by kind; `count` of random ids and fewer of the others."""
    few = max(1, count // 4)
    lengths = [(place, RANDOM_PROMPTS[place % 4], RANDOM_ANSWERS[place % 3]) for place in range(count)]
    halves = [
        np.concatenate([ids[: PROMPT // 2], random_ids(100 + place, PROMPT // 2, size)])
        for place, ids in enumerate(python[:few])
    ]
    return {
        "random ids": [task(random_ids(seed, prompt, size), answer) for seed, prompt, answer in lengths],
        "Python that turns into random ids": [task(ids) for ids in halves],
        "held-out Python, temperature 1": [task(ids, temperature=1.0) for ids in python[:few]],
        "short answers": [
            task(random_ids(200 + place, PROMPT, size), SHORT_ANSWERS[place % 3]) for place in range(max(3, few))
        ],
    }


def on_python(race: Race, python: Sequence[np.ndarray], repetitions: int) -> list[Figure]:
    """Measure one stream on held-out Python; every answer is the median of its repetitions."""
    ratios: list[float] = []
    lucky: list[float] = []
    accepted: list[float] = []
    for place, ids in enumerate(python):
        samples, (result,) = race.run([task(ids)], repetitions)
        ratio = statistics.median(samples)
        kept = result.work.drafts_accepted / max(1, result.work.draft_rounds)
        progress(f"document {place}: {ratio:.2f} times, {kept:.2f} guesses a round stayed")
        ratios.append(ratio)
        accepted.append(kept)
        lucky += [ratio] if kept >= LUCKY else []
    title = f"held-out Python, one stream, where {LUCKY:g} or more stay"
    return [
        Figure("guesses that stay a round, held-out Python", "tokens", accepted, "-"),
        floor("held-out Python, one stream", ratios, MIN_PYTHON),
        floor("held-out Python, one stream, worst answer", [min(ratios)], MIN_RANDOM),
        *([floor(title, lucky, MIN_LUCKY)] if lucky else []),
    ]


def on_hostile(race: Race, kinds: Mapping[str, Sequence[Task]], repetitions: int) -> list[Figure]:
    """Measure one stream on what drafting may lose; every answer is the median of its repetitions."""
    figures = []
    for kind, tasks in kinds.items():
        ratios = []
        for one in tasks:
            often = 1 + ANSWER // one.params.max_tokens // 4  # a short one is over before the clock tells much
            samples, (result,) = race.run([one], repetitions * often)
            ratios.append(statistics.median(samples))
            progress(
                f"{kind}, {len(one.prompt_ids)} tokens and {one.params.max_tokens}: {ratios[-1]:.3f} times, "
                f"{result.work.draft_rounds} rounds, {result.work.drafts_accepted} stayed"
            )
        figures += [
            floor(f"{kind}, one stream", ratios, MIN_RANDOM),
            floor(f"{kind}, one stream, worst answer", [min(ratios)], MIN_RANDOM),
        ]
    return figures


def floor(title: str, ratios: list[float], bound: float) -> Figure:
    """Return a figure that must reach a bound."""
    return Figure(title, "ratio", ratios, "the same core without drafts, same run", bound=bound, is_floor=True)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    made.add_argument("--kernels", help="kernels of both cores (HEADRACE_KERNELS, else PyTorch's)")
    made.add_argument("--random", type=int, default=12, metavar="N", help="prompts of random ids (12)")
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.path or shipped_model()
    race, python = Race(folder, args.threads, args.kernels), held_out(folder, DOCUMENTS)
    model = race.cores["off"].model
    size = model.config.vocab_size
    race.run([task(random_ids(STREAMS, PROMPT, size), min(SHORT_ANSWERS))], 1)  # what is made at first use is made
    figures = on_python(race, python, args.repetitions)
    figures += on_hostile(race, hostile(python, args.random, size), args.repetitions)
    strange = [task(random_ids(seed, PROMPT, size)) for seed in range(STREAMS)]
    for title, tasks in (("held-out Python", [task(ids) for ids in python[:STREAMS]]), ("random ids", strange)):
        ratios, _ = race.run(tasks, args.repetitions)
        figures += [
            floor(f"{title}, {STREAMS} streams", ratios, MIN_EIGHT),
            floor(f"{title}, {STREAMS} streams, worst run", [min(ratios)], MIN_EIGHT),
        ]
    return report("Drafting", args, figures, {"model": folder.name, "numerics": model.numerics.name})


if __name__ == "__main__":
    raise SystemExit(main())
