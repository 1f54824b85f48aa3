"""headrace-nano's side of conversations, without an engine."""

import functools
from typing import Any

from headrace.core.shipped import shipped_model
from headrace.models.deepseek_v41.config import load_config
from headrace.server.protocol.conversation import Protocol, Turn
from headrace.server.schemas.chat import ChatRequest
from headrace.server.schemas.messages import MessagesRequest
from headrace.server.schemas.responses import ResponsesRequest
from headrace.server.settings import ServerSettings
from headrace.text.tokenizer import Tokenizer

FOLDER = shipped_model()
TOKENIZER = Tokenizer.from_file(FOLDER)
CONFIG = load_config(FOLDER)
FORECAST: dict[str, Any] = {
    "name": "get_forecast",
    "description": "Tomorrow's weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CHAT_TOOLS = [{"type": "function", "function": FORECAST}]


def protocol(encoding: Any = "v4.1", **settings: Any) -> Protocol:
    """Return a fresh one, which remembers nothing."""
    return Protocol(CONFIG, TOKENIZER, ServerSettings(**settings), encoding)


@functools.cache
def shared() -> Protocol:
    """Return one for tests that read nothing from the past."""
    return protocol()


@functools.cache
def older() -> Protocol:
    """Return one of the encoding before, for the same tests."""
    return protocol("v4")


def chat(body: dict[str, Any], where: Protocol | None = None, salt: str | None = None) -> Turn:
    """Return the prompt of a body of chat completions."""
    return (where or shared()).read(ChatRequest.model_validate(body).wanted(salt))


def responses(body: dict[str, Any], where: Protocol | None = None) -> Turn:
    """Return the prompt of a body of responses."""
    return (where or shared()).read(ResponsesRequest.model_validate(body).wanted(None, []))


def messages(body: dict[str, Any], where: Protocol | None = None) -> Turn:
    """Return the prompt of a body of messages."""
    return (where or shared()).read(MessagesRequest.model_validate({"max_tokens": 64, **body}).wanted(None))


def prompt_text(turn: Turn) -> str:
    """Return a prompt as text, special tokens spelled out."""
    return TOKENIZER.decode(turn.prompt_ids)


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}
