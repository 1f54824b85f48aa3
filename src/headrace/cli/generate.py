"""`headrace generate`: continue one prompt."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.cli.cache_options import add_cache_options, cache_options
from headrace.cli.ngram_options import add_ngram_options, ngram_options
from headrace.cli.progress import byte_progress
from headrace.cli.token_ids import read_token_ids
from headrace.core.errors import UserError
from headrace.engine.llm import LLM
from headrace.engine.result import Result
from headrace.engine.sampling.params import SamplingParams

_MAX_PROMPT_BYTES = 64 << 20
_SHORT_PROMPT = 1024  # tokens; longer ones show how far they are read


def add_parser(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("generate", help="continue a prompt", description="Continue one prompt.")
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a checkpoint folder (the shipped model)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file that holds the text")
    prompt.add_argument("--token-ids", type=Path, metavar="FILE", help="a JSON list of token ids instead of text")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens to generate at most (256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most probable (0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the most probable P of the mass (1)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="fixes the randomness; drawn and reported if missing")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument(
        "--mode", choices=("full", "replay"), default="replay", help="decoder on all of the prompt, or on its end"
    )
    parser.add_argument("--no-draft", action="store_true", help="one token at a time; the answer is the same")
    parser.add_argument("--threads", type=int, metavar="N", help="PyTorch threads; chosen if missing")
    add_cache_options(parser)
    add_ngram_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")


def run(args: argparse.Namespace) -> int:
    """Generate.

    Raises:
        UserError: the prompt, an option or the checkpoint is refused.
    """
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        logprobs=False,
    )
    prompt = _prompt(args)
    with _loading(args.path) as progress:
        drafting = "off" if args.no_draft else "auto"
        options = {"mode": args.mode, "threads": args.threads, "num_slots": 1, "drafting": drafting}
        llm = LLM(args.path, progress=progress, **options, **cache_options(args), **ngram_options(args))
    with llm:
        num_tokens = len(llm.encode(prompt))
        result = _stream(llm, prompt, num_tokens, params, is_quiet=args.json)
        if args.json:
            print(json.dumps(_document(llm, result), ensure_ascii=False, indent=2))
        else:
            _summary(llm, result)
    return 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.token_ids is not None:
        return [int(token_id) for token_id in read_token_ids(args.token_ids)]
    if args.prompt is not None:
        return str(args.prompt)
    try:
        with args.prompt_file.open("rb") as file:
            data = file.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise UserError(f"{args.prompt_file} is longer than the {_MAX_PROMPT_BYTES:,} bytes a prompt may have.")
        return data.decode("utf-8")
    except OSError as problem:
        raise UserError(f"cannot read {args.prompt_file}: {problem.strerror or problem}.") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{args.prompt_file} is not UTF-8: byte {problem.start} cannot be decoded.") from None


@contextmanager
def _loading(path: Path | None) -> Iterator[Callable[[int], object] | None]:
    files = path.glob("*.safetensors") if path is not None and path.is_dir() else ()
    total = sum(file.stat().st_size for file in files if file.is_file())
    with byte_progress("loading", total) as progress:
        yield progress


@contextmanager
def _reading(num_tokens: int) -> Iterator[Callable[[int], object] | None]:
    """Show how much of a long prompt has been read, on standard error."""
    if num_tokens <= _SHORT_PROMPT:
        yield None
        return
    from tqdm import tqdm

    # a bar where someone watches it, otherwise a line now and then
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=num_tokens, desc="reading", unit="token", leave=False, file=sys.stderr, mininterval=interval
    ) as bar:
        yield bar.update


def _stream(llm: LLM, prompt: str | list[int], num_tokens: int, params: SamplingParams, *, is_quiet: bool) -> Result:
    with _reading(num_tokens) as on_prefill:
        pieces = llm.stream([prompt], params, on_prefill=on_prefill)
        piece = next(pieces)
    while True:
        if not is_quiet:
            print(piece.text, end="", flush=True)
        if piece.result is not None:
            return piece.result
        piece = next(pieces)


def _document(llm: LLM, result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": dataclasses.asdict(result.usage),
        "timings": {name: round(value, 6) for name, value in dataclasses.asdict(llm.timings).items()},
        "draft": {
            "proposed": result.work.drafts_proposed,
            "accepted": result.work.drafts_accepted,
            "rounds": result.work.draft_rounds,
        },
        "seed": result.seed,
        "numerics": result.numerics,
        "mode": llm.mode,
        "work": dataclasses.asdict(result.work),
        "cache_reason": result.cache_reason,
        "is_approximate": result.is_approximate,
    }


def _summary(llm: LLM, result: Result) -> None:
    timings, usage = llm.timings, result.usage
    if result.text and not result.text.endswith("\n"):
        print()
    if not result.text and result.token_ids and llm.tokenizer is None:
        print(json.dumps(result.token_ids))
    cached = ", ".join(f"{count} from {tier}" for tier, count in usage.cached_tokens_by_tier.items() if count)
    source = f" ({cached})" if cached else ""
    print(
        f"{usage.prompt_tokens} prompt tokens{source} in {timings.prefill_s:.2f} s, "
        f"{usage.completion_tokens} generated in {timings.decode_s:.2f} s, first after {timings.ttft_s:.2f} s; "
        f"loaded in {timings.load_s:.2f} s; {result.finish_reason}; seed {result.seed}",
        file=sys.stderr,
    )
