"""Bodies in which something was replaced by anything: each becomes a prompt or a refusal, and nothing else."""

import copy
import random
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.core.errors import UserError
from headrace.engine.sampling.structured import compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from tests.server.protocol.nano import CHAT_TOOLS, FORECAST, TOKENIZER, chat, messages, responses, user

VOCABULARY = GrammarVocabulary(TOKENIZER, 1)
CALL = {"id": "c1", "type": "function", "function": {"name": "get_forecast", "arguments": '{"city": "Ulm"}'}}
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (
        chat,
        {
            "messages": [
                {"role": "system", "content": "S json"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "C", "reasoning_content": "R", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            "tools": CHAT_TOOLS,
            "tool_choice": "required",
            "reasoning_effort": "none",
            "stop": ["x"],
            "logit_bias": {"5": 1.5},
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "parallel_tool_calls": False,
        },
    ),
    (
        chat,
        {
            "messages": [user("json")],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
            },
            "thinking": {"type": "enabled"},
            "seed": 5,
            "max_tokens": 9,
        },
    ),
    (
        responses,
        {
            "input": [
                {"role": "developer", "content": "D"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "C"}]},
                {"type": "function_call", "call_id": "c1", "name": "get_forecast", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            "instructions": "I",
            "tools": [{"type": "function", **FORECAST}],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}},
            "include": ["message.output_text.logprobs"],
        },
    ),
    (
        messages,
        {
            "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                user("hi"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "R", "signature": "s"},
                        {"type": "text", "text": "C"},
                        {"type": "tool_use", "id": "c1", "name": "get_forecast", "input": {"city": "Ulm"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
            ],
            "tools": [{"name": "get_forecast", "input_schema": FORECAST["parameters"]}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
    ),
]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    1e400,
    float("nan"),
    "",
    "x",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    [None],
    {"": 1},
    "user",
    "system",
    "auto",
    "data:,",
    "|" * 5000,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to everything in a value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(body: dict[str, Any], path: tuple[Any, ...], odd: Any, draw: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    kind = draw.randrange(4)
    if kind == 0 and isinstance(at, dict):
        at.pop(path[-1])
    elif kind == 1 and isinstance(at, dict):
        at["unheard_of"] = odd
    elif kind == 2 and isinstance(at, list):
        at.append(at[path[-1]])
    else:
        at[path[-1]] = odd
    return body


@pytest.mark.parametrize("case", range(len(BODIES)))
def test_every_change_is_read_or_refused(case: int) -> None:
    read, body = BODIES[case]
    draw = random.Random(case)
    outcomes = {"read": 0, "refused": 0}
    for path in places(body):
        for odd in draw.sample(ODD, 8):
            try:
                turn = read(changed(body, path, odd, draw))
                if turn.params.structured is not None:
                    compile_structured(turn.params.structured, VOCABULARY)
                turn.parsing()
                turn.generator("id", "nano")
                turn.resolve(len(turn.prompt_ids), 16_384)
                outcomes["read"] += 1
            except (UserError, ValidationError):
                outcomes["refused"] += 1
    assert outcomes["read"] > 20
    assert outcomes["refused"] > 50
