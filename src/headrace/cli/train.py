"""`headrace train`: carry out a recipe in a folder, or go on with the run in it."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import UserError

if TYPE_CHECKING:
    from headrace.train.draft_loop import DraftRecord
    from headrace.train.evaluate import Evaluation
    from headrace.train.loop import StepRecord
    from headrace.train.progress import Pace

_SECONDS_BETWEEN_LINES = 10.0  # where nobody watches; a terminal shows one line that changes


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train a model by a recipe",
        description="Carry out a recipe: train, judge, save. SIGINT or SIGTERM ends the run after the step at hand, "
        "with everything saved; --resume goes on from there and gives the bits an uninterrupted run would have given.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a name, a .json file, or a .py file with a function recipe()")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--backbone",
        type=Path,
        metavar="PATH",
        help="of a draft recipe: the checkpoint, or the folder of the run, whose drafts are trained",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after step N, although the recipe goes on")
    parser.add_argument("--show", action="store_true", help="print the recipe as JSON and do nothing")


def run(args: argparse.Namespace) -> int:
    """Train.

    Raises:
        UserError: the recipe, an option, the text, the folder or the state in it is refused.
    """
    from headrace.train.recipe_json import to_json
    from headrace.train.recipes import load_recipe

    recipe = load_recipe(args.recipe)
    if args.show:
        print(json.dumps(to_json(recipe), indent=2, ensure_ascii=False))
        return 0
    if args.out is None:
        raise UserError("--out is missing; the folder of the run is accepted.", param="out")
    if args.steps is not None and args.steps < 0:
        raise UserError(f"--steps is {args.steps}; 0 or more is accepted.", param="steps")

    import torch

    from headrace.train.run import train

    torch.set_num_threads(recipe.threads)
    watcher = _Watcher()
    with _stop_on_signal() as stop:
        outcome = train(
            recipe,
            args.out,
            watcher,
            backbone=args.backbone,
            is_resumed=args.resume,
            last_step=args.steps,
            should_stop=lambda: stop.is_asked,
        )
    watcher.end()
    state = "done" if outcome.is_done else "stopped; go on with --resume"
    print(f"{state} after step {outcome.step}: {outcome.checkpoint}")
    return 0


class _Stop:
    """Whether a signal asked for the end."""

    is_asked = False


@contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """Note the first SIGINT or SIGTERM and finish the step at hand; the second one acts as if nobody listened."""
    stop = _Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: object) -> None:
        stop.is_asked = True
        print("\nstopping after this step; once more stops at once", file=sys.stderr, flush=True)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watcher:
    """Shows one changing line on a terminal, and a line now and then elsewhere, on standard error."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = 0.0
        self._width = 0

    def on_start(self, summary: "Mapping[str, Any]") -> None:
        """Say how large the model is and what its update rules keep."""
        from headrace.train.summary import summary_lines

        for line in summary_lines(summary):
            self._print(line)

    def on_step(self, record: "StepRecord | DraftRecord", pace: "Pace") -> None:
        """Show how far the run is."""
        from headrace.train.progress import progress_line

        line = progress_line(pace, record.loss, record.bits_per_byte)
        if record.is_skipped:
            self._print(f"step {record.step} was skipped: its loss or gradients are not finite")
        elif getattr(record, "went_back_to", None) is not None:
            self._print(f"spike at step {record.step}: the run goes back to step {record.went_back_to}")
        elif self._is_terminal:
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES or record.step == pace.last_step:
            self._shown = time.monotonic()
            self._print(line)

    def on_evaluation(self, evaluation: "Evaluation") -> None:
        """Show the figures."""
        from headrace.train.progress import evaluation_line

        self._print(evaluation_line(evaluation.step, evaluation.values))

    def on_proof(self, when: str, digest: str) -> None:
        """Show the hash of the frozen backbone."""
        self._print(f"backbone {when} training: sha256 {digest}")

    def on_saved(self, checkpoint: Path) -> None:
        """Say where the checkpoint is."""
        self._print(f"saved {checkpoint}")

    def end(self) -> None:
        """Leave the changing line."""
        if self._width:
            print(file=sys.stderr)
            self._width = 0

    def _print(self, line: str) -> None:
        self.end()
        print(line, file=sys.stderr, flush=True)
