"""Anticipatory routing: what choosing experts some steps early adds to a training step, on the tiny model.

Both variants train on the same batches: forward and backward pass, all update rules. The anticipating one also runs one
queued batch forward without gradients, and trains with the experts chosen that way four steps before. Counted in
products, three forward passes' work becomes four: a third more where nothing overlaps. V4 reports some 20 % of wall
time with overlap on its machines. On a CPU at these widths a forward pass is more than a third of a step: scoring,
picking, routing and n-gram rows have no backward pass. Bound: 60 % more CPU time.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.memory.addressing import Addressing
from headrace.models.deepseek_v41.config import Config, load_config
from headrace.train.anticipatory import LiveRoutes, LookAhead, PassRouter, RouteRecord, RouteSource
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.masters import init_masters
from headrace.train.optim.optimizer import Optimizer
from headrace.train.optim.ownership import Splits, family_rules

from ._measure import ROOT, Figure, interleaved, parser, report, time_figure

DELTA, ROWS, LENGTH, RATE = 4, 8, 256, 1e-3
MAX_OVERHEAD = 0.6

Batch = list[Document]


class RandomBatches:
    """Batches of random token ids; the place is a step."""

    def __init__(self, config: Config) -> None:
        self._high, self._step = config.vocab_size - 16, 0

    def next_batch(self) -> Batch:
        """Return the batch of the step and go on."""
        draws = np.random.default_rng([1, self._step])
        self._step += 1
        return [Document(draws.integers(3, self._high, LENGTH)) for _ in range(ROWS)]

    def state(self) -> int:
        """Return the step."""
        return self._step

    def restore(self, state: Any) -> None:
        """Go to a step."""
        self._step = state


class Trainer:
    """A model, its optimizer and a queue of batches: the smallest loop that can anticipate."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._masters = init_masters(config, seed=1)
        self._graph = TrainGraph(self._masters, _addressing(config))
        frozen = ["mtp.*"] if config.draft else []
        frozen += [name for name in self._masters.parameters if ".indexer." in name]  # no index loss here
        self._optimizer = Optimizer(
            dict(self._masters.parameters), family_rules("v4.1"), Splits.of(config), frozen=frozen
        )
        self._queue = LookAhead(RandomBatches(config), DELTA)

    def live_step(self) -> None:
        """Train one step with the experts of today's scores."""
        self._train(self._queue.advance().batch, LiveRoutes())

    def anticipating_step(self) -> None:
        """Choose the experts of the newest queued batch, then train on the oldest with those chosen for it."""
        for place, batch in self._queue.unrouted():
            record = RouteRecord()
            with torch.inference_mode():
                self._graph.forward(batch, GraphOptions(), self._router(record.recorder()))
            self._queue.store(place, record)
        queued = self._queue.advance()
        self._train(queued.batch, queued.routes.player() if queued.routes else LiveRoutes())

    def _router(self, source: RouteSource) -> PassRouter:
        return PassRouter(source, self.config.experts_per_token, self.config)

    def _train(self, batch: Batch, source: RouteSource) -> None:
        logits = self._graph.forward(batch, GraphOptions(), self._router(source)).logits()
        labels = torch.from_numpy(np.concatenate([np.roll(document.token_ids, -1) for document in batch]))
        torch.nn.functional.cross_entropy(logits, labels).backward()
        self._optimizer.step(RATE)
        self._optimizer.zero_grad()


def _addressing(config: Config) -> Addressing | None:
    if config.engram is None:
        return None
    engram = config.engram
    return Addressing(
        layer_ids=engram.layer_ids,
        num_embeddings=engram.num_embeddings,
        max_ngram=engram.max_ngram,
        first_prime_above=engram.first_prime_above,
        num_hashes=engram.num_hashes,
        pad_token_id=engram.pad_token_id,
        compressed_vocab_size=engram.compressed_vocab_size,
        token_map=np.arange(config.vocab_size) % engram.compressed_vocab_size,
    )


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    config = load_config(args.source)
    trainers = {name: Trainer(config) for name in ("live", "anticipating")}
    steps = {"live": trainers["live"].live_step, "anticipating": trainers["anticipating"].anticipating_step}
    for step in steps.values():
        step()  # warms up, and fills the queue with routes
    samples = interleaved(steps, args.repetitions)
    figures = [time_figure(f"step, {name}", taken, "the other, same run") for name, taken in samples.items()]
    shares = [late / early - 1.0 for early, late in zip(figures[0].cpu_s, figures[1].cpu_s, strict=True)]
    overhead = Figure("added by anticipation", "of a step", shares, "a third more work", bound=MAX_OVERHEAD)
    notes = {"model": args.source.name, "tokens per step": ROWS * LENGTH, "steps ahead": DELTA}
    return report("Anticipatory routing", args, [*figures, overhead], notes)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument(
        "source",
        nargs="?",
        type=Path,
        default=ROOT / "configs" / "tiny.json",
        help="a configuration to fill with random weights (configs/tiny.json)",
    )
    raise SystemExit(main(options.parse_args()))
