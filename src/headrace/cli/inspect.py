"""`headrace inspect`: say what a checkpoint or a configuration is. Reads headers only, unless asked to verify."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace.checkpoint.catalog import open_catalog
from headrace.cli.progress import byte_progress
from headrace.kernels.native.choice import choose, numerics_name, wanted_kernels
from headrace.models.deepseek_v41.check import check_catalog, verify_catalog
from headrace.models.deepseek_v41.config import Config, load_config
from headrace.models.deepseek_v41.inspect import bytes_by_dtype, report

# parts of the backbone stand below it
_INDENT = {"total": "", "backbone": "  ", "engram_tables": "  ", "draft": "  ", "vision": "  "}
_TITLES = {"total": "parameters"}


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "inspect",
        help="say what a checkpoint or a configuration is, from headers alone",
        description="Say what a checkpoint or a configuration is: tensors, bytes, layers, state, parameters.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint folder, or a single config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--verify", action="store_true", help="read every tensor and check every number in it")


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        UserError: the configuration or the checkpoint is refused.
    """
    config = load_config(args.path)
    result = report(config)
    result["numerics"] = numerics_name(choose(wanted_kernels(None)).id)
    if args.path.is_dir():
        catalog = open_catalog(args.path)
        check_catalog(catalog, config)
        result |= {
            "num_tensors": len(catalog.tensors),
            "total_bytes": catalog.total_bytes,
            "bytes_by_dtype": bytes_by_dtype(entry.spec for entry in catalog.tensors.values()),
        }
        if args.verify:
            with byte_progress("verifying", catalog.total_bytes) as progress:
                verify_catalog(catalog, config, progress)
            _verify_tokenizer(args.path, config)
            result["verified"] = True
    elif args.verify:
        print("headrace: a configuration alone has no weights; its values were checked.", file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(_text(result, args.path))
    return 0


def _verify_tokenizer(folder: Path, config: Config) -> None:
    """Check that the tokenizer gives the token map that the n-gram tables were made for."""
    if config.engram is None:
        return
    from headrace.memory.addressing import Addressing
    from headrace.text.token_map import build_token_map
    from headrace.text.tokenizer import Tokenizer

    token_map, _ = build_token_map(Tokenizer.from_file(folder))
    Addressing(
        layer_ids=config.engram.layer_ids,
        num_embeddings=config.engram.num_embeddings,
        max_ngram=config.engram.max_ngram,
        first_prime_above=config.engram.first_prime_above,
        num_hashes=config.engram.num_hashes,
        pad_token_id=config.engram.pad_token_id,
        compressed_vocab_size=config.engram.compressed_vocab_size,
        token_map=token_map,
    ).require((config.image_token_id or 0) + 1)


def _billions(count: float) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e8 else f"{count / 1e6:,.3f} M"


def _bytes(count: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count:,.0f} bytes ({count / size:,.2f} {unit})"
    return f"{count:,g} bytes"


def _text(result: dict[str, Any], path: Path) -> str:
    pairs = [
        ("model type", result["model_type"]),
        ("tensors", f"{result['num_tensors']:,}"),
        ("stored", _bytes(result["total_bytes"])),
        *((f"  {dtype}", _bytes(count)) for dtype, count in result["bytes_by_dtype"].items()),
        *(
            (f"{_INDENT.get(kind, '    ')}{_TITLES.get(kind, kind.replace('_', ' '))}", _billions(count))
            for kind, count in result["parameters"].items()
        ),
        ("active per token", ""),
        *((f"  {mode}", _billions(count)) for mode, count in result["active_parameters"].items()),
        ("global KV per token", f"{result['kv_bytes_per_token']:,} bytes"),
        *((f"  {context['tokens']:,} tokens", _bytes(context["bytes"])) for context in result["contexts"]),
        ("windows per sequence", _bytes(result["window_bytes_per_sequence"])),
        ("numerics", result["numerics"]),
        ("state per sequence", _bytes(result["state_bytes_per_sequence"])),
    ]
    if result.get("verified"):
        pairs.append(("verified", "every tensor was read; all names, shapes, formats and numbers are right"))
    width = max(len(name) for name, _ in pairs)
    lines = [str(path), "", *(f"{name:<{width}}  {value}".rstrip() for name, value in pairs), ""]
    return "\n".join(lines + _layer_table(result["layers"]))


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    """One line per layer; neighbours that differ in nothing but their number share one."""
    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for layer in layers:
        extras = ", ".join(
            word for word, key in (("n-gram table", "has_ngram"), ("candidate pool", "has_candidates")) if layer[key]
        )
        cells = (
            layer["half"] or "draft",
            layer["role"],
            str(layer["ratio"]),
            "-" if layer["kv_source"] is None else str(layer["kv_source"]),
            "-" if layer["index_source"] is None else str(layer["index_source"]),
            extras,
        )
        if rows and rows[-1][2] == cells:
            rows[-1] = (rows[-1][0], layer["id"], cells)
        else:
            rows.append((layer["id"], layer["id"], cells))
    table: list[tuple[str, ...]] = [("layers", "half", "role", "ratio", "KV from", "picks from", "")]
    table += [(str(first) if first == last else f"{first}-{last}", *cells) for first, last, cells in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
