"""`headrace plan`: what a model asks of memory, disk and bandwidth; the ledger of the reports' figures."""

import argparse
import json
from typing import Any

from headrace.core.errors import UserError

_DESCRIPTION = (
    "Say what a model and its sequences take: weights by kind, global KV, windows, n-gram tables, what fits where, "
    "bytes read per decoded token. From a configuration alone; no weight is read. Sizes take units: 64GiB, 1.5TB, "
    "460GB/s."
)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "plan", help="say what a model takes, and check the reports' figures", description=_DESCRIPTION
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a released name, a checkpoint folder, or a config.json")
    add("--context", type=int, metavar="N", help="tokens of every sequence")
    add("--sessions", type=int, metavar="S", help="sequences that are kept, none of them shared (1)")
    add("--memory", metavar="BYTES", help="memory there is (no limit)")
    add("--disk", metavar="BYTES", help="disk there is for the checkpoint and resting sequences (no limit)")
    add("--bandwidth", metavar="BYTES/S", help="bandwidth of memory: bounds tokens per second")
    add("--disk-bandwidth", metavar="BYTES/S", help="bandwidth of the disk, where weights are read from it")
    add("--ledger", action="store_true", help="compute the reports' own figures instead")
    add("--measure", action="store_true", help="with --ledger: run headrace-nano and set its counters beside")
    add("--tokens", type=int, metavar="N", help="with --measure: prompt of the run (10000)")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the plan or the ledger.

    Raises:
        UserError: an option or the configuration is refused, or options do not go together.
    """
    _check_together(args)
    return _ledger(args) if args.ledger else _plan(args)


def _check_together(args: argparse.Namespace) -> None:
    planned = ("model", "context", "sessions", "memory", "disk", "bandwidth", "disk_bandwidth")
    if args.ledger:
        given = [name for name in planned if getattr(args, name) is not None]
        if given:
            raise UserError(
                f"{_spelled(given[0])} is {getattr(args, given[0])!r}; the ledger is computed from the shipped "
                "configurations and takes --measure, --tokens and --json.",
                param=given[0],
            )
        if args.tokens is not None and not args.measure:
            raise UserError(f"--tokens is {args.tokens}; it is accepted with --measure only.", param="tokens")
        return
    for name in ("measure", "tokens"):
        if getattr(args, name):
            raise UserError(f"--{name} is given without --ledger; it belongs to the ledger.", param=name)
    for name in ("model", "context"):
        if getattr(args, name) is None:
            raise UserError(f"{_spelled(name)} is missing; `headrace plan MODEL --context N` is accepted.", param=name)


def _spelled(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _plan(args: argparse.Namespace) -> int:
    from headrace.plan.families import read_model
    from headrace.plan.report import Wanted, make_plan
    from headrace.plan.sizes import parse_size
    from headrace.plan.text import plan_lines

    budgets = {
        name: None if getattr(args, name) is None else parse_size(getattr(args, name), _spelled(name))
        for name in ("memory", "disk", "bandwidth", "disk_bandwidth")
    }
    wanted = Wanted(context=args.context, sessions=1 if args.sessions is None else args.sessions, **budgets)
    plan = make_plan(read_model(args.model), wanted)
    print(json.dumps(plan, indent=2, allow_nan=False) if args.json else "\n".join(plan_lines(plan)))
    return 0


def _ledger(args: argparse.Namespace) -> int:
    from headrace.plan.ledger.figures import ledger, shipped_models
    from headrace.plan.text import ledger_lines

    live = {}
    if args.measure:
        from headrace.core.shipped import shipped_model
        from headrace.plan.measure import DEFAULT_TOKENS, measure

        live = measure(shipped_model(), DEFAULT_TOKENS if args.tokens is None else args.tokens)
    figures = ledger(shipped_models())
    if args.json:
        document = {"figures": [figure.to_json(live.get(figure.key)) for figure in figures]}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print("\n".join(ledger_lines(figures, live)))
    return 0
