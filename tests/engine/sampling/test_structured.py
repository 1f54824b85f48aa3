"""Models of random logits, which want special tokens most of all, answer what the structure says and nothing else."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.sampling.spec import Structured
from tests.engine.sampling.vocabularies import answer, setting, text_of

NAMES = ("synthetic", "trained", "released")


def is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def is_person(v: Any) -> bool:
    return (
        {"name", "age"} <= set(v) <= {"name", "age", "tags"}
        and 1 <= len(v["name"]) <= 20
        and is_whole(v["age"], 0, 130)
        and len(v.get("tags", [])) <= 3
        and set(v.get("tags", [])) <= {"a", "b"}
    )


def is_tree(v: Any) -> bool:
    return (
        {"v"} <= set(v) <= {"v", "kids"}
        and isinstance(v["v"], bool)
        and len(v.get("kids", [])) <= 1
        and all(map(is_tree, v.get("kids", [])))
    )


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    ({"type": "null"}, lambda v: v is None),
    ({"type": "integer", "minimum": -3, "maximum": 12}, lambda v: is_whole(v, -3, 12)),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500}, lambda v: v % 7 == 0 and is_whole(v, 0, 500)),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, lambda v: 0 < v <= 1),
    ({"type": "string", "maxLength": 6}, lambda v: isinstance(v, str) and len(v) <= 6),
    ({"type": "string", "minLength": 3, "maxLength": 5}, lambda v: 3 <= len(v) <= 5),
    ({"type": "string", "pattern": "^[a-f]{2,4}$"}, lambda v: re.fullmatch("[a-f]{2,4}", v) is not None),
    ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v) is not None),
    ({"type": "string", "format": "uuid"}, lambda v: re.fullmatch(r"[0-9a-fA-F-]{36}", v) is not None),
    ({"type": "string", "format": "ipv4"}, lambda v: all(int(part) < 256 for part in v.split("."))),
    ({"enum": ["red", 7, None, {"a": [1]}]}, lambda v: v in ["red", 7, None, {"a": [1]}]),
    ({"const": {"k": "水车"}}, lambda v: v == {"k": "水车"}),
    ({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, lambda v: v is None or is_whole(v, 0, 9)),
    ({"anyOf": [{"const": "x"}, {"type": "boolean"}]}, lambda v: v == "x" or isinstance(v, bool)),
    ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, lambda v: v is None or isinstance(v, bool)),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, lambda v: is_whole(v, 3, 5)),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        lambda v: 2 <= len(v) <= 4 and all(isinstance(item, bool) for item in v),
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False, "minItems": 2},
        lambda v: v == [1, None],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
        lambda v: len(v) <= 2 and all(isinstance(item, bool) for item in v.values()),
    ),
    (PERSON, is_person),
    (TREE, is_tree),
    ({"type": "object"}, lambda v: isinstance(v, dict)),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", range(len(SCHEMAS)))
def test_json_follows_its_schema(name: str, case: int) -> None:
    schema, is_valid = SCHEMAS[case]
    for seed in range(1 if name == "released" else 4):
        text = text_of(name, answer(name, Structured.json_schema(schema), seed))
        assert is_valid(json.loads(text)), text


REGEXES = [
    "[a-z]{3,8}@[a-z]{2,5}\\.(com|org)",
    "(yes|no|maybe)",
    "-?[0-9]{1,4}(\\.[0-9]{1,2})?",
    "[一-龥]{2,5}",
    "(😀|👩|é){1,4}!",
    "\\d{4}-\\d{2}-\\d{2}T\\d{2}:\\d{2}",
    "a*b?",
    '[^\\n"]{1,9}\\n',
    "(?i)wheel",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regular_expression_matches_the_whole_answer(name: str, pattern: str) -> None:
    for seed in range(1 if name == "released" else 4):
        text = text_of(name, answer(name, Structured.regex(pattern), seed))
        assert re.fullmatch(pattern, text), text


CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ['qu"o\\te', "line\nend", "tab\t", "\x7f\x00"],
    ["水车", "水", "👩‍👩‍👧", "é", "\u2028"],
    ["<think>", "<|end|>", "<eos>", "// no comment", "/x/"],
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("texts", CHOICES)
def test_a_choice_gives_one_of_its_texts_and_in_the_end_each(name: str, texts: list[str]) -> None:
    found = {text_of(name, answer(name, Structured.choice(texts), seed)) for seed in range(4)}
    assert found <= set(texts)
    if name == "trained":
        assert {text_of(name, answer(name, Structured.choice(texts), seed)) for seed in range(60)} == set(texts)


GRAMMARS = [
    ('start: greeting " " name\ngreeting: "Hello" | "Hi"\nname: /[A-Z][a-z]{1,5}/', r"(Hello|Hi) [A-Z][a-z]{1,5}"),
    ('start: NUMBER (op NUMBER){1,3}\nop: "+" | "-"\nNUMBER: /[0-9]{1,3}/', r"\d{1,3}([+-]\d{1,3}){1,3}"),
    ('start: "v=" value\nvalue: %json {"type": "boolean"}', r"v=(true|false)"),
    ('root ::= "a" [0-9]? | "b" "c"', r"a[0-9]?|bc"),
    ('start: "<think>" // <think> is text here\n | /<[a-c]>/', r"<think>|<[a-c]>"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_a_grammar_gives_its_texts(name: str, grammar: str, pattern: str) -> None:
    for seed in range(1 if name == "released" else 4):
        text = text_of(name, answer(name, Structured.grammar(grammar), seed))
        assert re.fullmatch(pattern, text), text


def test_a_grammar_that_nests_without_end_is_balanced() -> None:
    for seed in range(20):
        text = text_of("trained", answer("trained", Structured.grammar('start: "[" start "]" | "x"'), seed))
        assert re.fullmatch(r"\[*x\]*", text)
        assert text.count("[") == text.count("]")


@pytest.mark.parametrize("name", NAMES)
def test_no_special_token_is_part_of_an_answer_and_the_end_only_its_last(name: str) -> None:
    here = setting(name)
    assert len(here.tokenizer.added_ids) >= 3
    for seed in range(3):
        ids = answer(name, Structured.json_schema({"type": "string", "maxLength": 30}), seed)
        assert not here.tokenizer.added_ids & set(ids[:-1])
        assert ids[-1] == here.eos or ids[-1] not in here.tokenizer.added_ids
