"""Options of the prompt cache that several commands take, and the engine's options that they stand for."""

import argparse
from pathlib import Path
from typing import Any


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add where cached prompts rest and how they are gone on with."""
    add = parser.add_argument
    add("--cache-dir", type=Path, metavar="DIR", help="folder in which cached prompts outlive the process")
    add("--cache-bytes", type=int, metavar="BYTES", help="bytes of that folder (64 GiB)")
    add("--min-free-disk", type=int, metavar="BYTES", help="bytes of its file system that are left free (4 GiB)")
    add("--window-policy", choices=("none", "periodic", "full"), default="none", help="window rows kept there (none)")
    add("--checkpoint-every", type=int, metavar="N", help="tokens between periodic window rows (2048)")
    add("--host-cache", type=int, metavar="BYTES", help="memory for cached prompts that left the block pool (0)")
    add("--snapshot-ttl", type=float, metavar="S", help="seconds that unused window states stay in memory (600)")
    add("--resume", choices=("exact", "replay"), default="exact", help="without window rows: encode again, or replay")


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineOptions` that were asked for."""
    named = {
        "cache_disk_bytes": args.cache_bytes,
        "min_free_disk": args.min_free_disk,
        "checkpoint_every": args.checkpoint_every,
        "host_cache_bytes": args.host_cache,
        "snapshot_ttl_s": args.snapshot_ttl,
    }
    return {
        "resume": args.resume,
        "cache_dir": None if args.cache_dir is None else str(args.cache_dir),
        "window_policy": args.window_policy,
        **{option: value for option, value in named.items() if value is not None},
    }
