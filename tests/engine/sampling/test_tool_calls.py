"""Tool calls of models of random logits: each is one of the tools, with the parameters of its schema."""

import json
import re
from typing import Any

import pytest
import torch

from headrace.core.errors import InternalError, UserError
from headrace.core.shipped import shipped_model
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import sample
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_file(shipped_model())
EOS = 1
VOCABULARY = GrammarVocabulary(TOKENIZER, EOS)
MARKER = "｜DSML｜"
THINK_END = TOKENIZER.token_to_id("</think>")
MARK = TOKENIZER.token_to_id(MARKER)

FORECAST = {
    "name": "get_forecast",
    "parameters": {
        "type": "object",
        "$defs": {"unit": {"enum": ["celsius", "kelvin"]}},
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"$ref": "#/$defs/unit"},
            "parts": {"type": "array", "items": {"enum": ["wind", "rain"]}, "maxItems": 2},
            "code": {"type": ["string", "null"], "pattern": "^[A-Z]{2}/[0-9]$"},
        },
        "required": ["city", "days"],
    },
}
STOP = {"name": "stop", "parameters": {"type": "object", "properties": {}}}


def draw(spec: Structured, seed: int, most: int = 500) -> list[int]:
    state = SamplerState(
        SamplingParams(temperature=1.0, structured=spec, max_tokens=most),
        [5, 6],
        seed=seed,
        eos_token_id=EOS,
        vocab_size=TOKENIZER.size,
        matcher=compile_structured(spec, VOCABULARY).start(),
    )
    generator = torch.Generator().manual_seed(seed)
    preference = torch.zeros(TOKENIZER.size)
    preference[list(TOKENIZER.added_ids - {EOS, MARK})] = 20.0  # what must not come, the model wants most
    preference[MARK] = 8.0
    ids: list[int] = []
    while len(ids) < most:
        ids.append(sample(torch.randn(TOKENIZER.size, generator=generator) + preference, state))
        if state.accept(ids[-1]):
            return ids
    raise RuntimeError(f"no end after {most} tokens: {TOKENIZER.decode(ids)!r}")


def read_calls(text: str, space: str = " ") -> list[tuple[str, dict[str, Any]]]:
    """Read a block strictly: nothing but calls, each tag as the encoding writes it."""
    mark = MARKER + space
    call = re.compile(f'<{mark}invoke name="([^"]*)">\n(.*?)</{mark}invoke>\n', re.S)
    parameter = re.compile(f'<{mark}parameter name="([^"]*)" string="(true|false)">(.*?)</{mark}parameter>\n', re.S)
    found: list[tuple[str, dict[str, Any]]] = []
    while match := call.match(text):
        text = text[match.end() :]
        inside = match[2]
        arguments: dict[str, Any] = {}
        while value := parameter.match(inside):
            arguments[value[1]] = value[3] if value[2] == "true" else json.loads(value[3])
            inside = inside[value.end() :]
        assert inside == ""
        found.append((match[1], arguments))
    assert text == f"</{mark}calls>" if space else f"</{MARKER}tool_calls>"
    return found


def is_forecast(arguments: dict[str, Any]) -> bool:
    return (
        {"city", "days"} <= set(arguments) <= set(FORECAST["parameters"]["properties"])
        and len(arguments["city"]) <= 12
        and 1 <= arguments["days"] <= 9
        and arguments.get("unit", "kelvin") in ("celsius", "kelvin")
        and set(arguments.get("parts", [])) <= {"wind", "rain"}
        and (arguments.get("code") is None or re.fullmatch("[A-Z]{2}/[0-9]", arguments["code"]) is not None)
    )


def test_calls_name_a_tool_and_follow_its_schema() -> None:
    names = set()
    for seed in range(8):
        for name, arguments in read_calls(TOKENIZER.decode(draw(Structured.tool_calls([FORECAST, STOP]), seed))):
            names.add(name)
            assert is_forecast(arguments) if name == "get_forecast" else arguments == {}
    assert names == {"get_forecast", "stop"}


def test_one_call_is_one_call_and_the_older_dialect_has_its_own_tags() -> None:
    for seed in range(3):
        spec = Structured.tool_calls([FORECAST], dialect="v4", is_parallel=False)
        text = TOKENIZER.decode(draw(spec, seed))
        assert text.count("invoke name=") == 1
        assert text.startswith(f'<{MARKER}invoke name="get_forecast">\n<{MARKER}parameter name="city"')
        assert text.endswith(f"</{MARKER}invoke>\n</{MARKER}tool_calls>")


def test_every_tag_has_the_marker_token_and_no_text_spells_one() -> None:
    ids = draw(Structured.tool_calls([FORECAST]), 1)
    assert ids.count(MARK) == TOKENIZER.decode(ids).count(MARKER)


def fed(spec: Structured, text: str) -> Any:
    matcher = compile_structured(spec, VOCABULARY).start()
    for index, part in enumerate(text.split(MARKER)):
        if index:
            matcher.accept(MARK)
        for token_id in TOKENIZER.encode(part):
            matcher.accept(token_id)
    return matcher


def test_as_many_tools_as_agents_bring_are_followed() -> None:
    note = {"description": "what it is for " * 40}
    tools = [
        {"name": f"tool_{place}", "parameters": {"properties": {"a": {"enum": ["x", "y"], **note}}, "required": ["a"]}}
        for place in range(128)
    ]
    spec = Structured.tool_calls(tools, is_parallel=False)
    assert len(spec.text) > 65_536
    (found,) = read_calls(TOKENIZER.decode(draw(spec, 1)))
    assert re.fullmatch(r"tool_\d+", found[0])
    with pytest.raises(UserError, match=r"tool_calls has .* bytes; accepted are 524,288 at most"):
        Structured.tool_calls(tools * 8)


FREE = {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
OPENING = f'<{MARKER} invoke name="write">\n<{MARKER} parameter name="text" string="true">'
CLOSING = f"</{MARKER} parameter>\n</{MARKER} invoke>\n</{MARKER} calls>"


@pytest.mark.parametrize(
    "text",
    ["", "a < b", "</p>", "</", "<", "<</</x", "2>&1 <!-- /", "水车 😀\n\n", 'say "</parameter>"', "｜ </ ｜", "//"],
)
def test_free_text_holds_everything_but_a_marker(text: str) -> None:
    assert fed(Structured.tool_calls([FREE]), OPENING + text + CLOSING).is_done


@pytest.mark.parametrize("start", ["<", "x </"])
def test_free_text_cannot_spell_a_marker_in_letters(start: str) -> None:
    matcher = fed(Structured.tool_calls([FREE]), OPENING + start)
    with pytest.raises(InternalError, match="does not allow it"):
        for token_id in TOKENIZER.encode("｜"):  # its bytes are tokens of their own
            matcher.accept(token_id)


# ------------------------------------------------------------------------------------------ structures that begin late


def late(**more: Any) -> Any:
    spec = Structured("regex", "yes|no", **more)
    return compile_structured(spec, VOCABULARY).start()


def may_end(matcher: Any) -> bool:
    logits = torch.zeros(TOKENIZER.size)
    matcher.mask(logits)
    return bool(logits[EOS] == 0)


def test_before_its_token_everything_is_free_but_the_end() -> None:
    matcher = late(after=("</think>",))
    for token_id in TOKENIZER.encode("anything 水 goes"):
        assert not may_end(matcher)
        matcher.accept(token_id)
    with pytest.raises(InternalError, match="ended before its structure began"):
        matcher.copy().accept(EOS)
    matcher.accept(THINK_END)
    other = matcher.copy()
    for token_id in TOKENIZER.encode("yes"):
        matcher.accept(token_id)
    assert (matcher.is_done, other.is_done) == (True, False)
    with pytest.raises(InternalError, match="does not allow it"):
        other.accept(TOKENIZER.encode("x")[0])


def test_an_optional_structure_may_never_begin_once_what_comes_before_it_has() -> None:
    matcher = late(after=("</think>", MARKER), is_optional=True)
    matcher.accept(MARK)  # inside the reasoning it opens nothing
    assert not may_end(matcher)
    matcher.accept(THINK_END)
    assert may_end(matcher)
    assert matcher.can_end
    over = matcher.copy()
    over.accept(EOS)
    assert over.is_done
    matcher.accept(MARK)
    assert not may_end(matcher)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([], "accepted is a list of one or more"),
        ([{"name": "f", "parameters": []}], "tool 'f' is not understood"),
        ([{"name": 'f"', "parameters": {}}], "cannot stand in a tag"),
        ([{"name": "f", "parameters": {"properties": {"a>": {}}}}], "cannot stand in a tag"),
        ([{"name": "f", "parameters": {"properties": {"a": False}}}], "allows no value"),
        ([{"name": "f", "parameters": {"properties": {"a": {"enum": []}}}}], "allows no value"),
        ([{"name": "f", "parameters": {"properties": {"a": {"$ref": "#/x"}}}}], "leads nowhere"),
        (
            [
                {
                    "name": "f",
                    "parameters": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
                }
            ],
            "in circles",
        ),
        ([{"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}}], "Invalid type: nope"),
    ],
)
def test_tools_that_cannot_be_followed_are_refused_with_a_sentence(tools: Any, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        compile_structured(Structured.tool_calls(tools), VOCABULARY)


def test_tokens_to_wait_for_must_exist() -> None:
    with pytest.raises(UserError, match="needs the token '<nothing>'"):
        late(after=("<nothing>",))
    with pytest.raises(UserError, match="begins at once"):
        late(is_optional=True)
