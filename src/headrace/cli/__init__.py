"""The command line: parse, call, exit code. Each command lives in its own module and is imported when it is named.

Exit status: 0 done, 2 wrong use or refused input (one sentence on standard error), 1 anything else.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from headrace.core.errors import UserError

_COMMANDS = {
    "inspect": "say what a checkpoint or a configuration is, from headers alone",
    "synth": "write a random checkpoint of a configuration",
    "trace": "run one sequence and write what every layer saw",
    "generate": "continue a prompt",
    "serve": "answer over HTTP",
    "train": "train a model by a recipe",
    "evaluate": "judge a trained checkpoint",
    "calibrate": "fit the temperatures of a draft's confidences",
    "kernels": "say which implementation each operation uses, and why",
    "bench": "measure native kernels against the eager path",
    "plan": "say what a model takes, and check the reports' figures",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose refusals look like every other refusal, and that guesses no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with 2."""
        self.exit(2, f"headrace: {message.rstrip('.')}; `{self.prog} --help` lists what is accepted.\n")


def _build_parser(command: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="headrace", description="Run DeepSeek-V4.1-Flash checkpoints.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, summary in _COMMANDS.items():
        if name == command:
            import_module(f"headrace.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit status; 130 after an interrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter gets a question mark
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        try:
            status = _run(arguments, command)
        except SystemExit as stop:  # argparse: --help or wrong use
            status = stop.code if isinstance(stop.code, int) else 2
        sys.stdout.flush()
    except UserError as problem:
        return _fail(str(problem), 2)
    except KeyboardInterrupt:
        return _fail("interrupted.", 130)
    except BrokenPipeError:
        # the reader of standard output is gone, which is its right; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail("there is not enough memory.", 1)
    except Exception as problem:
        if os.environ.get("HEADRACE_TRACEBACK"):
            raise
        if isinstance(problem, OSError) and problem.filename is not None:
            # a path that no file can have, or one that may not be looked at
            return _fail(f"{problem.filename} cannot be used: {problem.strerror}; another path is needed.", 2)
        # the edge of the process: whatever happened, one sentence
        what = " ".join(str(problem).split()) or "no message"
        return _fail(f"unexpected {type(problem).__name__}: {what} (HEADRACE_TRACEBACK=1 shows where).", 1)
    return status


def _run(arguments: list[str], command: str | None) -> int:
    parser = _build_parser(command)
    args = parser.parse_args(arguments)
    if args.version:
        from headrace import __version__

        print(f"headrace {__version__}")
        return 0
    if args.command is None:
        parser.error(f"a command is missing; {', '.join(_COMMANDS)} are accepted")
    module = import_module(f"headrace.cli.{args.command}")
    return int(module.run(args) or 0)


def _fail(sentence: str, status: int) -> int:
    """Print one line: whatever a path or a tensor's name holds, control characters are spelled out."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in sentence)
    print(f"headrace: {line}", file=sys.stderr)
    return status
