"""`headrace synth`: write a random checkpoint of any configuration in the official format."""

import argparse
from pathlib import Path
from typing import Any

from headrace.cli.progress import byte_progress
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.inventory import expected_tensors
from headrace.models.deepseek_v41.synth import write_checkpoint


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "synth",
        help="write a random checkpoint of a configuration",
        description="Write a random checkpoint of any configuration in the official format, with a tokenizer.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a config.json, or a folder that holds one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same bytes (0)")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint.

    Raises:
        UserError: the configuration, the folder or the seed is refused, or the disk is full.
    """
    config = load_config(args.config)
    sizes = [spec.num_bytes for spec in expected_tensors(config)]
    with byte_progress("writing", sum(sizes)) as progress:
        write_checkpoint(config, args.out, seed=args.seed, progress=progress)
    print(f"{args.out}: {len(sizes):,} tensors, {sum(sizes):,} bytes, seed {args.seed}")
    return 0
