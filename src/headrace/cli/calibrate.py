"""`headrace calibrate`: fit the temperatures that make a draft's confidences honest."""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import UserError

if TYPE_CHECKING:
    from headrace.train.calibration import Calibration


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
    parser.add_argument(
        "--collect", type=Path, metavar="FILE", help="with --text, also keep what was drafted, as calibration data"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads, with --text (1)")
    parser.add_argument("--kernels", metavar="KERNELS", help="kernels, with --text (auto)")
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
    if args.collect is not None and args.text is None:
        raise UserError("--collect keeps what --text drafts; it is accepted with --text FILE.", param="collect")
    target = check_target(args.out)
    if args.collect is not None and check_target(args.collect) == target:
        raise UserError(f"--out and --collect are both {args.out}; two files are accepted.", param="collect")
    weights = weights_digest(path)
    logits, kept, document, source = _rows(path, args)
    found = fit_documents(logits, kept, document, weights=weights, source=source)
    served = _served(path, args, logits, kept, weights)
    text = json.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n"
    _write(target, text.encode(), "out")
    if args.json:
        print(text, end="")
        return 0
    print(
        f"{source}: fitted to {found.rows:,} rounds of {found.documents} documents; errors are those of fits to "
        f"{found.folds - 1} of {found.folds} parts on the one left out, by chance {max(found.by_chance):.4f} at most"
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
    if served is not None:
        print(served)
    print(f"written: {args.out}")
    return 0


def _served(path: Path, args: argparse.Namespace, logits: Any, kept: Any, weights: str) -> str | None:
    """Return what is to be said of the file that serving has read until now; None without a text or such a file."""
    from headrace.engine.drafting.temperatures import (
        TEMPERATURES_NAME,
        calibration_errors,
        read_temperatures,
        survival_of,
    )

    if args.text is None or not (path / TEMPERATURES_NAME).is_file():
        return None
    try:
        scale = read_temperatures(path / TEMPERATURES_NAME, logits.shape[1], weights)
    except UserError as problem:  # a new fit is the way out of it
        return f"{TEMPERATURES_NAME} beside the draft cannot be judged: {problem.message}"
    errors = ", ".join(f"{error:.4f}" for error in calibration_errors(survival_of(logits, scale), kept))
    return f"{TEMPERATURES_NAME} beside the draft, as serving reads it: calibration error {errors} on this text"


def _rows(path: Path, args: argparse.Namespace) -> tuple[Any, Any, Any, str]:
    """Return confidences [R, X], what was kept [R, X], documents [R], and what they are."""
    from headrace.checkpoint.tensor_file import check_target
    from headrace.train.calibration import CALIBRATION_NAME, calibration_bytes, read_calibration

    if args.text is None:
        data, source = read_calibration(path).rounds, CALIBRATION_NAME
    else:
        collected = check_target(args.collect) if args.collect is not None else None
        data, source = _collect(path, args).compact, f"greedy continuations of {args.text.name}"
        if collected is not None:
            _write(collected, calibration_bytes(data), "collect")
    return data.confidence.double().numpy(), data.accepted.bool().numpy(), data.document.long().numpy(), source


def _collect(path: Path, args: argparse.Namespace) -> "Calibration":
    """Return the rounds of a text."""
    import torch

    from headrace.engine.threads import check_threads
    from headrace.evaluate.draft_rows import RowSettings, collect_rows
    from headrace.evaluate.held_out import read_held_out
    from headrace.kernels.native.choice import VARIABLE
    from headrace.models.deepseek_v41.load import LoadOptions, load_model
    from headrace.models.deepseek_v41.model import Numerics
    from headrace.text.bpe import Encoder
    from headrace.text.tokenizer import FILE_NAME

    check_threads(args.threads)
    torch.set_num_threads(args.threads)
    kernels = args.kernels or os.environ.get(VARIABLE) or "auto"
    loaded = load_model(path, LoadOptions(numerics=Numerics(kernels=kernels), has_draft=True))
    if loaded.tokenizer is None:
        raise UserError(f"{path / FILE_NAME} is missing; text is accepted with a tokenizer.", param="text")
    encoder = Encoder((path / FILE_NAME).read_text(encoding="utf-8"))
    size = min(loaded.tokenizer.size, loaded.model.config.vocab_size)
    return collect_rows(loaded.model, size, read_held_out(args.text, encoder), RowSettings(), _show)


def _write(target: Path, content: bytes, param: str) -> None:
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {target}: {problem.strerror or problem}.", param=param) from None


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
