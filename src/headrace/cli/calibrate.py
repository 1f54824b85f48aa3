"""`headrace calibrate`: fit the temperatures that make a draft's confidences honest."""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.core.errors import UserError


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the temperatures of a draft's confidences",
        description="Fit a temperature, an offset and a slope per drafted token to the documents of "
        "calibration.safetensors beside the draft, and say the calibration error before and after: each document is "
        "judged by a fit to others. Serving reads the file as draft_temperatures.json beside the draft.",
    )
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint folder (the shipped model)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="draft along continuations of this held-out text instead"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch threads, with --text (1)")
    parser.add_argument("--json", action="store_true", help="print the file's content instead of lines")


def run(args: argparse.Namespace) -> int:
    """Fit, report and write.

    Raises:
        UserError: the checkpoint, its calibration data or the text is refused, or the file cannot be written.
    """
    from headrace.checkpoint.tensor_file import check_target
    from headrace.checkpoint.weights_digest import weights_digest
    from headrace.core.shipped import shipped_model
    from headrace.engine.drafting.temperatures import fit_documents

    path = args.path or shipped_model()
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; a checkpoint folder is accepted.", param="path")
    target = check_target(args.out)
    weights = weights_digest(path)
    logits, kept, document, source = _rows(path, args)
    found = fit_documents(logits, kept, document, weights=weights, source=source)
    text = json.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n"
    _write(target, text)
    if args.json:
        print(text, end="")
        return 0
    print(
        f"{source}: fitted to {found.rows:,} anchors of {found.documents} documents; errors are those of fits to "
        f"{found.folds - 1} of {found.folds} parts on the one left out"
    )
    scale = found.scale
    for place, (temperature, offset, slope) in enumerate(
        zip(scale.temperatures, scale.offsets, scale.slopes, strict=True)
    ):
        print(
            f"draft {place + 1}: temperature {temperature:.3f}, offset {offset:+.1f}, slope {slope:g} above "
            f"{scale.knees[place]:.2f}; calibration error {found.before[place]:.4f} before, {found.after[place]:.4f} "
            f"after ({found.plain[place]:.4f} with temperatures alone, {found.by_chance[place]:.4f} by chance)"
        )
    print(f"written: {args.out}")
    return 0


def _rows(path: Path, args: argparse.Namespace) -> tuple[Any, Any, Any, str]:
    """Return confidences [R, X], what was kept [R, X], documents [R], and what they are."""
    if args.text is None:
        from headrace.train.calibration import CALIBRATION_NAME, read_calibration

        data = read_calibration(path)
        return data.confidence.double().numpy(), data.accepted.bool().numpy(), data.document.numpy(), CALIBRATION_NAME
    import torch

    from headrace.engine.threads import check_threads
    from headrace.evaluate.draft_rows import RowSettings, collect_rows
    from headrace.evaluate.held_out import read_held_out
    from headrace.evaluate.subject import load_subject

    check_threads(args.threads)
    torch.set_num_threads(args.threads)
    subject = load_subject(path)
    rows = collect_rows(subject.model, read_held_out(args.text, subject.encoder), RowSettings(), _show)
    return rows.confidence, rows.accepted, rows.document, f"greedy continuations of {args.text.name}"


def _write(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {target}: {problem.strerror or problem}.", param="out") from None


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
