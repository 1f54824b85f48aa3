"""Official clients of a running server, and small conversations for them."""

import json
from typing import Any

import anthropic
import openai

from tests.server.serving import Served

MODEL = "headrace-nano"
OFF: Any = "none"
WHEEL: dict[str, Any] = {
    "name": "turn_wheel",
    "description": "Turns a wheel",
    "parameters": {
        "type": "object",
        "properties": {
            "way": {"type": "string", "enum": ["left", "right"]},
            "steps": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["way", "steps"],
        "additionalProperties": False,
    },
}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": WHEEL}
FLAT_TOOL: dict[str, Any] = {"type": "function", **WHEEL}
MESSAGES_TOOL: dict[str, Any] = {
    "name": WHEEL["name"],
    "description": WHEEL["description"],
    "input_schema": WHEEL["parameters"],
}


def openai_of(served: Served) -> openai.OpenAI:
    """Return OpenAI's client."""
    return openai.OpenAI(base_url=f"{served.base_url}/v1", api_key=served.api_key, max_retries=0, timeout=60)


def anthropic_of(served: Served) -> anthropic.Anthropic:
    """Return Anthropic's client."""
    return anthropic.Anthropic(base_url=served.base_url, api_key=served.api_key, max_retries=0, timeout=60)


def user(text: str) -> Any:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def check_wheel(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call; they must be as the tool's schema says."""
    found: dict[str, Any] = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(found) == {"way", "steps"}
    assert found["way"] in ("left", "right")
    assert isinstance(found["steps"], int)
    assert 1 <= found["steps"] <= 9
    return found


def rewritten(arguments: str) -> str:
    """Return the same arguments with other keys first and other spaces."""
    found = json.loads(arguments)
    return json.dumps(dict(reversed(found.items())), indent=1, separators=(" ,", " :  "))
