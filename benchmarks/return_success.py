"""Is a conversation that comes back answered as well as one that is read anew? Retrieval by situation.

Every conversation holds 16 fused pairs far apart in 7,000 tokens of held-out text; every question is 100 new tokens,
text and one query, whose answer is the value of one pair: the task that headrace-nano is judged on
(`headrace evaluate nano`). The same questions are asked in six situations, each through an engine:

    cold                    every prompt is read whole; nothing is cached
    at once                 the conversation is in memory, with its window states
    forgotten, replay       the window states outlived their time (`snapshot_ttl_s`), resume="replay"
    forgotten, exact        the same, exact from window rows on disk
    restarted, replay       another engine over the directory of the first, resume="replay"
    restarted, exact        the same, exact from window rows on disk

What an engine says of itself is checked with every answer: where cached tokens came from, and whether it is
approximate.
Bound: in every situation as many answers are right as cold, within 2 points.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.shipped import HELD_OUT_NAME, SHIPPED_MODEL, shipped_model
from headrace.engine.core.build import build_core
from headrace.engine.core.core import EngineCore
from headrace.engine.core.events import TokenEvent
from headrace.engine.core.options import EngineOptions, Resume
from headrace.engine.result import Result
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission
from headrace.evaluate.held_out import read_held_out
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary

from ._measure import Figure, parser, progress, report

POINTS = 2.0
COLD, AT_ONCE = "cold", "at once"
FORGOTTEN = {"replay": "forgotten, replay", "exact": "forgotten, exact"}
RESTARTED = {"replay": "restarted, replay", "exact": "restarted, exact"}
SITUATIONS = (AT_ONCE, *FORGOTTEN.values(), *RESTARTED.values())
WINDOWS: dict[Resume, str] = {"replay": "none", "exact": "periodic"}
_PAIRS = 16
_BLOCK = 128
_TTL_S = 0.02
_EVERY = 256


@dataclass(frozen=True, eq=False)
class Conversation:
    """Tokens that are there before, and per question the new ones [n] and the token that answers it."""

    old: np.ndarray
    questions: list[tuple[np.ndarray, int]]


@dataclass
class Said:
    """Per situation, for every question in order, whether the answer was right; and the wall seconds it all took."""

    right: dict[str, list[bool]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def share(self, situation: str) -> float:
        """Return how many per cent were right."""
        return 100.0 * float(np.mean(self.right[situation]))

    def changed(self, situation: str) -> int:
        """Return how many answers were right in one of the two, this situation and cold, and not in the other."""
        return sum(one != other for one, other in zip(self.right[situation], self.right[COLD], strict=True))


def conversations(folder: Path, count: int, old: int, new: int, questions: int) -> list[Conversation]:
    """Return conversations of `old` tokens with `questions` questions of `new` tokens each."""
    text = read_held_out(SHIPPED_MODEL / HELD_OUT_NAME, Encoder((folder / "tokenizer.json").read_text("utf-8"))).text
    noise = text.token_ids.astype(np.int64)
    vocabulary = PairVocabulary(
        num_keys=_PAIRS,
        num_values=_PAIRS,
        first_pair_id=special_tokens.FIRST_RESERVED_ID,
        noise_ids=noise,
        is_noise_text=True,
    )
    task = PairTask(vocabulary=vocabulary, num_pairs=_PAIRS, num_queries=_PAIRS, min_distance=_BLOCK + 1)
    made = []
    for number in range(count):
        draws = Draws(7, "return", old, number)
        sample = task.make(draws, old + _PAIRS)
        if sample is None:
            raise SystemExit(f"{old} tokens hold no {_PAIRS} pairs; {3 * _BLOCK} or more do")
        asked = []
        for place in range(old, old + min(questions, _PAIRS)):
            first = draws.integer(len(noise) - new)
            tokens = np.concatenate([noise[first : first + new - 1], sample.token_ids[place : place + 1]])
            asked.append((tokens, int(sample.labels[place])))
        made.append(Conversation(sample.token_ids[:old], asked))
    return made


@contextmanager
def engine(folder: Path, kernels: str | None, **options: Any) -> Iterator[EngineCore]:
    """Give an engine that loads the model, and close it."""
    made = EngineOptions(threads=1, num_slots=2, min_free_disk=0, drafting="off", kernels=kernels, **options)
    core = build_core(folder, made, None, None)
    try:
        yield core
    finally:
        core.close()


def ask(core: EngineCore, ids: np.ndarray, resume: Resume = "exact") -> Result:
    """Read a prompt and return what follows: one token, the most probable one."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=1, resume=resume, temperature=0.0)
    core.submit(Submission(request_id="one", prompt_ids=ids, params=params, seed=1, submitted=time.monotonic()))
    result = None
    while not core.is_idle:
        for event in core.step():
            if isinstance(event, TokenEvent) and event.result is not None:
                result = event.result
    if result is None:
        raise SystemExit("a request gave no result")
    return result


def _check(situation: str, result: Result, old: int) -> None:
    """See that an answer was made in the situation that it is counted for."""
    tiers = {"device": 0, "disk": 0, **result.usage.cached_tokens_by_tier}
    wanted = {COLD: (0, 0), AT_ONCE: (old, 0)} | dict.fromkeys(FORGOTTEN.values(), (old, 0))
    wanted |= {RESTARTED["replay"]: (0, old - old % _BLOCK), RESTARTED["exact"]: (0, old - old % _EVERY)}
    found = (min(tiers["device"], wanted[situation][0]), tiers["disk"])
    is_approximate = situation in {FORGOTTEN["replay"], RESTARTED["replay"]}
    if found != wanted[situation] or result.is_approximate != is_approximate:
        raise SystemExit(
            f"{situation}: {dict(tiers)} tokens were cached and the answer is "
            f"{'' if result.is_approximate else 'not '}approximate ({result.cache_reason})"
        )


class Asking:
    """Asks the questions of conversations in every situation; `said` is what came of it."""

    def __init__(self, folder: Path, kernels: str | None) -> None:
        self.folder, self.kernels = folder, kernels
        self.said = Said()

    def _note(self, situation: str, core: EngineCore, one: Conversation, number: int, resume: Resume = "exact") -> None:
        tokens, wanted = one.questions[number]
        began = time.perf_counter()
        result = ask(core, np.concatenate([one.old, tokens]), resume)
        self.said.seconds[situation] = self.said.seconds.get(situation, 0.0) + time.perf_counter() - began
        _check(situation, result, len(one.old))
        self.said.right.setdefault(situation, []).append(result.token_ids[0] == wanted)

    def in_memory(self, every: list[Conversation]) -> None:
        """Ask cold, at once, and after the window states were forgotten (by replay)."""
        with engine(self.folder, self.kernels, has_prefix_cache=False) as core:
            for one in every:
                for number in range(len(one.questions)):
                    self._note(COLD, core, one, number)
        with engine(self.folder, self.kernels, snapshot_ttl_s=None) as core:
            for one in every:
                ask(core, one.old)
                for number in range(len(one.questions)):
                    self._note(AT_ONCE, core, one, number)
        with engine(self.folder, self.kernels, snapshot_ttl_s=_TTL_S) as core:
            for one in every:
                self._forgotten(core, one, "replay")

    def _forgotten(self, core: EngineCore, one: Conversation, resume: Resume) -> None:
        ask(core, one.old)
        for number in range(len(one.questions)):
            time.sleep(2 * _TTL_S)
            self._note(FORGOTTEN[resume], core, one, number, resume)

    def on_disk(self, one: Conversation, resume: Resume) -> None:
        """Ask after window states were forgotten (where they are on disk) and after a restart, in a new directory."""
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
            options = {"cache_dir": place, "window_policy": WINDOWS[resume], "checkpoint_every": _EVERY}
            with engine(self.folder, self.kernels, snapshot_ttl_s=_TTL_S, **options) as core:
                if resume == "exact":
                    self._forgotten(core, one, resume)
                else:
                    ask(core, one.old)
            with engine(self.folder, self.kernels, **options) as core:
                for number in range(len(one.questions)):
                    core.clear_cache()  # what the question before brought into memory: this one comes from disk too
                    self._note(RESTARTED[resume], core, one, number, resume)


def figures_of(said: Said) -> list[Figure]:
    """Return the share of right answers per situation, and how far each is from cold."""
    count = len(said.right[COLD])
    figures = [Figure(f"right answers of {count}, {COLD}", "%", [said.share(COLD)], "-")]
    for name in SITUATIONS:
        apart = abs(said.share(name) - said.share(COLD))
        figures.append(Figure(f"right answers, {name}", "%", [said.share(name)], "-"))
        figures.append(Figure(f"apart from cold, {name}", "points", [apart], COLD, bound=POINTS))
        figures.append(Figure(f"answers right in one of both, {name}", "answers", [float(said.changed(name))], COLD))
    return figures


def measure(folder: Path, kernels: str | None, every: list[Conversation]) -> Said:
    """Ask everything."""
    asking = Asking(folder, kernels)
    asking.in_memory(every)
    for number, one in enumerate(every):
        progress(f"conversation {number + 1} of {len(every)} on disk")
        for resume in WINDOWS:
            asking.on_disk(one, resume)
    return asking.said


def options() -> argparse.ArgumentParser:
    """Return the parser."""
    made = parser(__doc__)
    made.add_argument("path", nargs="?", type=Path, help="a checkpoint folder (the shipped model)")
    made.add_argument("--conversations", type=int, default=20, metavar="N", help="conversations (20)")
    made.add_argument("--questions", type=int, default=_PAIRS, metavar="N", help="questions of each, at most 16 (16)")
    made.add_argument("--old", type=int, default=7000, metavar="N", help="tokens of a conversation (7,000)")
    made.add_argument("--new", type=int, default=100, metavar="N", help="new tokens of a question (100)")
    made.add_argument("--kernels", metavar="NAME", help="as HEADRACE_KERNELS; the engine's choice if missing")
    return made


def main() -> int:
    """Measure and report."""
    args = options().parse_args()
    torch.set_num_threads(args.threads)
    folder = args.path or shipped_model()
    every = conversations(folder, args.conversations, args.old, args.new, args.questions)
    said = measure(folder, args.kernels, every)
    notes = {name: f"{seconds:.1f} s for {len(said.right[name])} answers" for name, seconds in said.seconds.items()}
    return report("Answers of conversations that come back", args, figures_of(said), notes)


if __name__ == "__main__":
    raise SystemExit(main())
