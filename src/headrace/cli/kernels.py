"""`headrace kernels`: which implementation each operation uses, and why."""

import argparse
import json
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "kernels",
        help="say which implementation each operation uses, and why",
        description="Say which implementation each operation uses, and why. HEADRACE_KERNELS chooses: torch, native, "
        "auto, or native: with operations between commas.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        UserError: the environment asks for something that is not there.
    """
    from headrace.kernels.native.choice import OPERATIONS, choose, wanted_kernels
    from headrace.kernels.native.library import available, load, why_absent

    wanted = wanted_kernels(None)
    choice = choose(wanted)
    sets = available()
    chosen = load().instruction_set if sets else None
    operations = [
        {
            "operation": name,
            "implementation": "native" if name in choice.native else "torch",
            "reason": f"{wanted} was asked for" if name in choice.native else choice.reasons[name],
            "what": what,
        }
        for name, what in OPERATIONS.items()
    ]
    document = {
        "id": choice.id,
        "instruction_sets": list(sets),
        "instruction_set": chosen,
        "absent": why_absent(),
        "operations": operations,
    }
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(_text(document))
    return 0


def _text(document: dict[str, Any]) -> str:
    built = ", ".join(document["instruction_sets"]) or f"none: {document['absent']}"
    lines = [f"kernels          {document['id']}", f"native           {built}"]
    if document["instruction_set"]:
        lines.append(f"used             {document['instruction_set']}; the bits are the same on each")
    width = max(len(one["operation"]) for one in document["operations"])
    rows = [
        f"{one['operation']:<{width}}  {one['implementation']:<6}  {one['reason']}; {one['what']}"
        for one in document["operations"]
    ]
    return "\n".join([*lines, "", *rows])
