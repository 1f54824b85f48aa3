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
        "auto, or native: with operations between commas. --check compares every kernel with its reference on this "
        "processor, --time times it.",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare every kernel that serves with its reference, bit for bit"
    )
    parser.add_argument("--time", action="store_true", help="time every kernel at released sizes; about half a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the table; the status is 1 where a kernel differs from its reference.

    Raises:
        UserError: the environment asks for something that is not there, or kernels that are absent shall be checked.
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
    document: dict[str, Any] = {
        "id": choice.id,
        "instruction_sets": list(sets),
        "instruction_set": chosen,
        "absent": why_absent(),
        "operations": operations,
    }
    if args.check:
        document["checks"] = _checks(sets)
    if args.time:
        document["times"] = _times()
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(_text(document))
    return int(any(one["differing"] for one in document.get("checks", [])))


def _checks(sets: tuple[str, ...]) -> list[dict[str, Any]]:
    from headrace.kernels.native.conformance import FOLDERS, cases, differing
    from headrace.kernels.native.library import load

    libraries = [load(name) for name in sets] or [load()]  # the latter says why there are none
    found = []
    for folder in FOLDERS:
        listed = cases(folder)
        wrong = [what for case in listed for what in differing(case, libraries)]
        found.append({"kernel": folder, "cases": len(listed), "differing": wrong})
    return found


def _times() -> list[dict[str, Any]]:
    from headrace.kernels.native.benchmark import measure, workloads
    from headrace.kernels.native.conformance import FOLDERS
    from headrace.kernels.native.library import load

    library = load()
    library.use_threads(1)
    timings = [(folder, measure(one)) for folder in FOLDERS for one in workloads(folder, library)]
    return [
        {
            "kernel": folder,
            "what": timing.workload.name,
            "cpu_us": round(1e6 * timing.cpu_s, 2),
            "gigabytes_per_s": round(timing.gigabytes_per_s, 3),
            "gigaflops": round(timing.gigaflops, 3),
        }
        for folder, timing in timings
    ]


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
    for one in document.get("checks", []):
        said = "; ".join(one["differing"]) or "equal to the reference"
        rows.append(f"check  {one['kernel']:<{width}}  {one['cases']:>3} cases  {said}")
    for one in document.get("times", []):
        speed = f"{one['cpu_us']:>11,.1f} CPU-us {one['gigabytes_per_s']:>7.1f} GB/s {one['gigaflops']:>7.1f} GFLOP/s"
        rows.append(f"time   {one['kernel']:<{width}}  {speed}  {one['what']}")
    return "\n".join([*lines, "", *rows])
