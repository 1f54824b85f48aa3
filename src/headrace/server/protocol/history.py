"""The exact tokens of past answers, so that a conversation that comes back reads from the cache what was generated.

Clients send an answer back as text and JSON, whose tokens are often not those the model chose: argument keys come in
another order, numbers are written another way. So the tokens of every answer are kept, under a digest of what the
conversation means up to and with it, and put in the place of the rendered ones.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.server.protocol.segments import ASSISTANT, EOS, THINK, THINK_END, ChatTokens, Segment

if TYPE_CHECKING:
    from deepseek_recipe import Message

MAX_ANSWERS = 4096
MAX_TOKENS = 4 << 20


@dataclass(frozen=True)
class RawTurn:
    """Tokens of one answer: its reasoning, and what came behind it up to the end of the turn (without that token)."""

    reasoning: str
    reasoning_ids: tuple[int, ...]
    content_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.reasoning_ids) + len(self.content_ids)


@dataclass(frozen=True)
class Said:
    """What an answer says, whichever dialect tells it: text, reasoning, calls as (name, arguments)."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class History:
    """Keeps the tokens of the newest answers. May be used from many threads."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._lock = threading.Lock()
        self._turns: OrderedDict[bytes, RawTurn] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, key: bytes, turn: RawTurn) -> None:
        """Keep an answer; the oldest go where there are too many."""
        with self._lock:
            old = self._turns.pop(key, None)
            self._tokens += len(turn) - (0 if old is None else len(old))
            self._turns[key] = turn
            while len(self._turns) > self._max_answers or (self._tokens > self._max_tokens and self._turns):
                _, gone = self._turns.popitem(last=False)
                self._tokens -= len(gone)

    def get(self, key: bytes) -> RawTurn | None:
        """Return an answer, which is the newest then."""
        with self._lock:
            turn = self._turns.get(key)
            if turn is not None:
                self._turns.move_to_end(key)
            return turn


def keys(salt: str | None, messages: "Sequence[Message]") -> Iterator[tuple[bytes, "Message"]]:
    """Yield each message of a conversation with the digest of everything up to and with it."""
    digest = hashlib.blake2b((salt or "").encode("utf-8", "replace"), digest_size=16)
    for message in messages:
        calls = tuple((call.name, call.arguments) for call in message.tool_calls or ())
        digest.update(_meaning(message.role, message.content, calls))
        yield digest.copy().digest(), message


def key_of_answer(salt: str | None, messages: "Sequence[Message]", said: Said) -> bytes:
    """Return the digest of a conversation and the answer to it; a last message that is continued is part of that."""
    digest = hashlib.blake2b((salt or "").encode("utf-8", "replace"), digest_size=16)
    content = said.content
    for message in messages:
        if message.prefix:
            content = message.content + content
            continue
        calls = tuple((call.name, call.arguments) for call in message.tool_calls or ())
        digest.update(_meaning(message.role, message.content, calls))
    digest.update(_meaning("assistant", content, said.calls))
    return digest.digest()


def splice(
    segments: list[Segment], messages: "Sequence[Message]", salt: str | None, history: History, tokens: ChatTokens
) -> list[int]:
    """Return the ids of a prompt in which past answers have the tokens they were generated with.

    Reasoning is there only where the encoding kept it.
    """
    answers = [(key, one) for key, one in keys(salt, messages) if one.role == "assistant" and not one.prefix]
    spans = list(_answers(segments))
    if len(spans) != len(answers):
        return tokens.ids(segments)
    ids: list[int] = []
    done = 0
    for (start, stop), (key, _) in zip(spans, answers, strict=True):
        turn = history.get(key)
        if turn is None:
            continue
        ids += tokens.ids(segments[done:start])
        ids += _replaced(segments[start:stop], turn, tokens)
        done = stop
    return ids + tokens.ids(segments[done:])


def raw_turn(tail: Sequence[int], generated: Sequence[int], text: str | None, tokens: ChatTokens) -> RawTurn:
    """Return the parts of an answer.

    Args:
        tail: ids of the prompt behind the last assistant token; they belong to the answer.
        generated: ids of the answer.
        text: what the answer shows where a stop string cut it, None where nothing did.
        tokens: the vocabulary.
    """
    generated = list(generated)
    if generated and generated[-1] == tokens.eos:
        generated.pop()
    if text is not None:
        generated = _cut(generated, text, tokens)
    whole = [*tail, *generated]
    if not whole or whole[0] != tokens.think:
        return RawTurn("", (), tuple(whole[1:]))
    end = whole.index(tokens.think_end) if tokens.think_end in whole else len(whole)
    reasoning = whole[1:end]
    return RawTurn(tokens.text(reasoning), tuple(reasoning), tuple(whole[end + 1 :]))


def tail_of(prompt_ids: Sequence[int], tokens: ChatTokens) -> list[int]:
    """Return the ids of a prompt behind its last assistant token."""
    found = len(prompt_ids)
    while found and prompt_ids[found - 1] != tokens.assistant:
        found -= 1
    return list(prompt_ids[found:])


def canonical_arguments(arguments: str) -> str:
    """Return arguments in one spelling, whatever the order of keys and the spaces between them."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _meaning(role: str, content: str, calls: tuple[tuple[str, str], ...]) -> bytes:
    parts: list[Any] = [role, content, [[name, canonical_arguments(arguments)] for name, arguments in calls]]
    return json.dumps(parts, ensure_ascii=True).encode() + b"\n"


def _answers(segments: list[Segment]) -> Iterator[tuple[int, int]]:
    """Yield where each finished answer stands: behind its assistant token, up to its end token."""
    start: int | None = None
    for index, segment in enumerate(segments):
        if not segment.is_special:
            continue
        if segment.text == ASSISTANT:
            start = index + 1
        elif segment.text == EOS and start is not None:
            yield start, index
            start = None


def _replaced(segments: list[Segment], turn: RawTurn, tokens: ChatTokens) -> list[int]:
    if not segments or segments[0] != Segment(THINK, is_special=True):
        return [tokens.think_end, *turn.content_ids]
    end = segments.index(Segment(THINK_END, is_special=True))
    reasoning = "".join(segment.text for segment in segments[1:end])
    kept = list(turn.reasoning_ids) if reasoning == turn.reasoning.lstrip("\n") else tokens.plain(reasoning)
    return [tokens.think, *kept, tokens.think_end, *turn.content_ids]


def _cut(ids: list[int], text: str, tokens: ChatTokens) -> list[int]:
    """Return ids of which the text is `text`: the longest beginning that fits, and the rest of it encoded anew."""
    while ids and not text.startswith(shown := tokens.text(ids)):
        ids = ids[:-1]
    shown = tokens.text(ids)
    return ids + tokens.plain(text[len(shown) :])
