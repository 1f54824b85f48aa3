"""Options of reading n-gram tables that several commands take, and the engine's options that they stand for."""

import argparse
from typing import Any

from headrace.memory.source_name import SCALES_NAMES, SOURCE_NAMES


def add_ngram_options(parser: argparse.ArgumentParser) -> None:
    """Add where rows of n-gram tables come from; nothing of it changes an answer."""
    add = parser.add_argument
    add("--ngram-source", choices=SOURCE_NAMES, help="where rows of n-gram tables come from (by their size)")
    add("--ngram-scales", choices=SCALES_NAMES, help="where their scales lie with the source read (by their size)")
    add("--ngram-cache-bytes", type=int, metavar="BYTES", help="cache of single rows (256 MiB with the source read)")
    add("--ngram-workers", type=int, metavar="N", help="threads of the source read (4)")


def ngram_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineOptions` that stand for them."""
    return {
        "ngram_source": args.ngram_source,
        "ngram_scales": args.ngram_scales,
        "ngram_cache_bytes": args.ngram_cache_bytes,
        "ngram_workers": args.ngram_workers,
    }
