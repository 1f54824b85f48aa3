"""`headrace evaluate`: judge a trained checkpoint, with paired errors and controls that must fail."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace.core.errors import UserError

_NAMES = ("nano",)


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "evaluate",
        help="judge a trained checkpoint",
        description="Judge a trained checkpoint on text it never saw: bits per byte, retrieval, drafting, candidate "
        "pool, n-gram memory. Every comparison is paired and has a standard error and a control that must fail.",
    )
    parser.add_argument("name", metavar="NAME", help="what to judge: nano")
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint folder (the shipped model)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="held-out text (that beside the shipped model)")
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="how much to judge; time grows with it (12)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch threads (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def run(args: argparse.Namespace) -> int:
    """Judge.

    Raises:
        UserError: a name, an option, the checkpoint or the text is refused.
    """
    from headrace.core.shipped import HELD_OUT_NAME, SHIPPED_MODEL, shipped_model

    if args.name not in _NAMES:
        raise UserError(f"evaluation {args.name!r} is unknown; {', '.join(_NAMES)} is accepted.", param="name")
    path = args.path or shipped_model()
    text = args.text or SHIPPED_MODEL / HELD_OUT_NAME
    if not text.is_file():
        missing = "no held-out text ships with this version" if args.text is None else f"{text} is not a file"
        raise UserError(f"{missing}; --text FILE with one JSON object a line is accepted.", param="text")

    import torch

    from headrace.engine.threads import check_threads
    from headrace.evaluate.report import judge, to_json
    from headrace.evaluate.settings import Settings
    from headrace.evaluate.summary import lines

    check_threads(args.threads)
    torch.set_num_threads(args.threads)
    report = judge(path, text, Settings(rows=args.rows), _show)
    if args.json:
        print(json.dumps(to_json(report), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        print("\n".join(lines(report)))
    return 0


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
