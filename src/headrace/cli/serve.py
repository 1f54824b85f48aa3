"""`headrace serve`: answer over HTTP."""

import argparse
from pathlib import Path
from typing import Any

from headrace.cli.cache_options import add_cache_options, cache_options
from headrace.cli.ngram_options import add_ngram_options, ngram_options
from headrace.core.errors import UserError

_MAX_KEY_FILE_BYTES = 1 << 20
_SHIPPED_NAME = "headrace-nano"


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("serve", help="answer over HTTP", description="Answer over HTTP.")
    add = parser.add_argument
    add("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint folder (the shipped model)")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen at (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen at, 0 for a free one (8000)")
    add("--api-key", action="append", default=[], metavar="K", help="a key that requests must carry; may be repeated")
    add("--api-key-file", type=Path, metavar="FILE", help="a file with one such key a line")
    add("--model-name", metavar="NAME", help="name under which the model is served (the folder's)")
    add("--max-context", type=int, metavar="N", help="tokens of the longest sequence (the model's)")
    add("--max-memory", type=int, metavar="BYTES", help="memory of the engine's process; refused if it is too little")
    add_cache_options(parser)
    add_ngram_options(parser)
    add("--mode", choices=("full", "replay"), default="replay", help="decoder on all of a prompt, or on its end")
    add("--no-draft", action="store_true", help="one token of an answer at a time; answers are the same")
    add("--slots", type=int, default=16, metavar="N", help="answers that are generated at once (16)")
    add("--threads", type=int, metavar="N", help="PyTorch threads; chosen if missing")
    add("--max-waiting", type=int, default=128, metavar="N", help="requests that may wait; one more gets 429 (128)")
    add("--max-body", type=int, default=32 << 20, metavar="BYTES", help="bytes of a request's body (33554432)")
    add("--request-timeout", type=float, metavar="S", help="seconds after which a request is given up (never)")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help="lets pages of it call; may be repeated")
    add("--allow-image-urls", action="store_true", help="fetch images that requests name by http(s) address")
    add("--log-prompts", action="store_true", help="write the text of prompts into the log")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted.

    Raises:
        UserError: an option, the address or the checkpoint is refused.
    """
    from headrace.engine.llm import LLM
    from headrace.server.run import serve
    from headrace.server.settings import ServerSettings

    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=(*args.api_key, *_keys(args.api_key_file)),
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body,
        request_timeout_s=args.request_timeout,
        cors_origins=tuple(args.cors_origin),
        allow_image_urls=args.allow_image_urls,
        logs_prompts=args.log_prompts,
    )
    options = {
        "mode": args.mode,
        "drafting": "off" if args.no_draft else "auto",
        "num_slots": args.slots,
        "threads": args.threads,
        "max_context": args.max_context,
        "max_memory": args.max_memory,
        "max_waiting": args.max_waiting,
        **cache_options(args),
        **ngram_options(args),
    }
    name = args.model_name or (_SHIPPED_NAME if args.path is None else args.path.resolve().name)
    serve(
        settings,
        name,
        lambda: LLM(args.path, **options),
        lambda address: print(f"headrace serves {name} at {address}", flush=True),
    )
    return 0


def _keys(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_KEY_FILE_BYTES).decode("utf-8")
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror or problem}.") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{file} is not UTF-8: byte {problem.start} cannot be decoded.") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{file} holds no API key; accepted is one key a line")
    return keys
