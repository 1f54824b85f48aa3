"""The commands keep the names and options that other people's scripts rely on."""

import re
import subprocess
import sys

import pytest

PROMISED = {
    "inspect": {"--json", "--verify"},
    "synth": {"--out", "--seed"},
    "trace": {
        "--token-ids", "--out", "--mode", "--chunk", "--split", "--feed", "--prefix", "--images", "--draft",
    },
    "generate": {
        "--prompt", "--prompt-file", "--token-ids", "--max-tokens", "--temperature", "--top-p", "--seed", "--mode",
        "--no-draft", "--threads", "--json",
    },
    "serve": {"--host", "--port", "--api-key", "--cache-dir", "--max-context", "--max-memory"},
    "train": {"--out", "--resume"},
    "evaluate": {"--json"},
    "calibrate": {"--out"},
    "plan": {"--context", "--sessions", "--json"},
    "kernels": {"--json"},
    "bench": {"--json"},
}  # fmt: skip

# Further options, free to change; listed so that adding one is a decision.
OWN: dict[str, set[str]] = {
    "inspect": set(),
    "synth": set(),
    "trace": {"--draft-start", "--index-scores", "--threads"},
    "generate": {
        "--stop", "--cache-dir", "--cache-bytes", "--min-free-disk", "--window-policy", "--checkpoint-every",
        "--host-cache", "--snapshot-ttl", "--resume", "--ngram-source", "--ngram-scales", "--ngram-cache-bytes",
        "--ngram-workers",
    },
    "serve": {
        "--api-key-file", "--model-name", "--mode", "--slots", "--threads", "--max-waiting", "--max-body",
        "--request-timeout", "--cors-origin", "--allow-image-urls", "--log-prompts", "--cache-bytes", "--window-policy",
        "--checkpoint-every", "--host-cache", "--resume", "--no-draft", "--min-free-disk", "--snapshot-ttl",
        "--ngram-source", "--ngram-scales", "--ngram-cache-bytes", "--ngram-workers",
    },
    "train": {"--steps", "--show", "--backbone"},
    "evaluate": {"--text", "--rows", "--threads"},
    "calibrate": {"--json", "--text", "--collect", "--kernels", "--threads"},
    "kernels": {"--check", "--time"},
    "bench": {"--kernels", "--config", "--threads"},
    "plan": {"--memory", "--disk", "--bandwidth", "--disk-bandwidth", "--ledger", "--measure", "--tokens"},
}  # fmt: skip


def options(*command: str) -> set[str]:
    """Return the long options that `headrace COMMAND --help` lists, `--help` left out."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", done.stdout)) - {"--help"}


@pytest.mark.parametrize("command", sorted(PROMISED))
def test_a_command_has_exactly_the_listed_options(command: str) -> None:
    assert options(command) == PROMISED[command] | OWN[command]


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["inspect", "--no-such-option"]])
def test_wrong_use_is_exit_status_2(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
