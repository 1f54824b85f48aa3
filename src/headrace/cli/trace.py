"""`headrace trace`: run one sequence through the cached path and write what every layer saw."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.checkpoint.tensor_file import check_target, read_tensors, write_tensors
from headrace.cli.token_ids import read_token_ids
from headrace.core.errors import UserError
from headrace.engine.threads import check_threads
from headrace.models.deepseek_v41.batch import Work
from headrace.models.deepseek_v41.images import encode_images
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import Numerics
from headrace.models.deepseek_v41.trace import PromptImages, TraceOptions, trace


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "trace",
        help="run one sequence and write what every layer saw",
        description="Run one sequence through the cached path and write every layer's tensors to a safetensors file.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint folder")
    parser.add_argument("--token-ids", type=Path, required=True, metavar="FILE", help="a JSON list of token ids")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
    parser.add_argument(
        "--mode", choices=("full", "replay"), default="replay", help="decoder on all rows, or on the last window"
    )
    parser.add_argument("--chunk", type=int, metavar="N", help="prefill in chunks of N tokens")
    parser.add_argument("--split", type=int, metavar="N", help="full mode: prefill N tokens, the rest one by one")
    parser.add_argument("--feed", type=Path, metavar="FILE", help="replace every layer's input by this file's")
    parser.add_argument("--prefix", default="", metavar="P", help="prefix of the names in the feed file")
    parser.add_argument("--images", type=Path, metavar="FILE", help="safetensors with patches and token_types")
    parser.add_argument("--draft", action="store_true", help="also draft greedily after every position")
    parser.add_argument("--draft-start", type=int, metavar="N", help="first position to draft after (without a feed)")
    parser.add_argument(
        "--index-scores", choices=("bf16", "fp32"), default="bf16", help="round index scores as the vendor does, or not"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="PyTorch threads (1)")


def run(args: argparse.Namespace) -> int:
    """Trace the sequence.

    Raises:
        UserError: a file, an option or the checkpoint is refused.
    """
    _check(args)
    torch.set_num_threads(args.threads)
    token_ids = read_token_ids(args.token_ids)
    feed = read_tensors(args.feed) if args.feed else None
    options = LoadOptions(
        numerics=Numerics(is_fp32_index=args.index_scores == "fp32"),
        has_draft=args.draft,
        has_vision=args.images is not None,
    )
    model = load_model(args.path, options).model
    images = _images(args, model, token_ids) if args.images else None
    how = TraceOptions(
        mode=args.mode,
        chunk=args.chunk,
        split=args.split,
        prefix=args.prefix,
        has_draft=args.draft,
        draft_start=args.draft_start,
    )
    work = Work()
    tensors = trace(model, token_ids, how, feed=feed, images=images, work=work)
    write_tensors(args.out, tensors)
    print(
        f"{args.out}: {len(tensors)} tensors of {len(token_ids)} tokens; {work.layer_rows:,} layer-rows, "
        f"{work.producer_rows:,} producer rows, {work.replayed_rows:,} replayed rows, "
        f"{work.index_scored:,} index scores",
        file=sys.stderr,
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    check_threads(args.threads)
    check_target(args.out)
    for name in ("chunk", "split"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; a number from 1 up is accepted.", param=name)
    if args.draft_start is not None and args.draft_start < 0:
        raise UserError(f"--draft-start is {args.draft_start}; a position from 0 up is accepted.", param="draft_start")
    if args.prefix and not args.feed and not args.images:
        raise UserError("--prefix names tensors of a feed or image file, and none was given.", param="prefix")


def _images(args: argparse.Namespace, model: Any, token_ids: np.ndarray) -> PromptImages:
    tensors = read_tensors(args.images)
    found = []
    for name in ("patches", "token_types"):
        keys = [key for key in (name, args.prefix + name, f"image.{name}") if key in tensors]
        if not keys:
            raise UserError(f"{args.images} has no tensor {name}; patches and token_types are needed.", param="images")
        found.append(tensors[keys[0]])
    patches, types = found
    if types.numel() != len(token_ids):
        raise UserError(
            f"{args.images} has token_types for {types.numel()} tokens, the sequence has {len(token_ids)}.",
            param="images",
        )
    if types.is_floating_point() or types.dtype == torch.bool:
        raise UserError(f"{args.images} has token_types of dtype {types.dtype}; whole numbers are accepted.")
    is_image, rows = encode_images(model, patches, types.reshape(-1).numpy())
    return PromptImages(is_image, rows)
