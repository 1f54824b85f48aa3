"""The examples of docs/chat.md run as they stand, but for address and key."""

import contextlib
import io
import json
import re
from typing import Any

import pytest

from headrace.server.protocol.effort import NAMES
from headrace.server.schemas.chat import ChatRequest
from headrace.server.schemas.extensions import Extensions
from headrace.server.schemas.messages import MessagesRequest
from headrace.server.schemas.responses import ResponsesRequest
from tests.architecture.tree import ROOT
from tests.server.serving import Served

TEXT = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")


def test_examples_run(served: Served) -> None:
    names: dict[str, Any] = {}
    outputs = []
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S):
        code = block.replace("http://127.0.0.1:8000", served.base_url).replace('"KEY"', repr(served.api_key))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "docs/chat.md", "exec"), names)
        outputs.append(out.getvalue())
    for name in ("client", "claude"):
        names[name].close()
    assert len(outputs) == 5
    assert outputs[1].startswith('turn_wheel {"way": "')
    assert int(outputs[1].split("\n")[1].split()[0]) > 150
    assert isinstance(json.loads(outputs[2])["ok"], bool)
    assert outputs[4].endswith("\n")


@pytest.mark.parametrize(
    ("dialect", "model"),
    [("chat completions", ChatRequest), ("responses", ResponsesRequest), ("messages", MessagesRequest)],
)
def test_every_field_is_in_the_table(dialect: str, model: Any) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {dialect} |"))
    _, _, accepted, unused, refused, _ = row.split("|")
    named = {re.split(r"[.:]", name)[0] for name in re.findall(r"`([^`]+)`", accepted + unused)}
    fields = set(model.model_fields) - set(Extensions.model_fields)
    assert fields - named <= {"stream_options"}
    assert not set(re.findall(r"`(\w+)`", refused)) & fields
    for name in Extensions.model_fields:
        assert f"`{name}`" in TEXT


def test_the_table_of_efforts_is_the_code_s() -> None:
    for name, number in NAMES.items():
        row = next(line for line in TEXT.splitlines() if line.startswith("| `") and f"`{name}`" in line)
        assert (f"| {number} |" in row) if number else ("thinking is off" in row)
