"""Structures before a request is queued, and matchers step by step."""

import pickle
import re

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer as Backend
from tokenizers import models

from headrace.core.errors import InternalError, UserError
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import RowError, sample_batch
from headrace.engine.sampling.spec import MAX_SPEC_BYTES, Structured
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import Matcher, compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from headrace.text.tokenizer import Tokenizer
from tests.engine.sampling.vocabularies import setting

HERE = setting("synthetic")  # ids below 256 are bytes
EOS = HERE.eos


def start(spec: Structured) -> Matcher:
    return compile_structured(spec, HERE.vocabulary).start()


def allowed(matcher: Matcher, vocab: int = 400) -> set[int]:
    logits = torch.zeros(vocab)
    matcher.mask(logits)
    return set((logits == 0).nonzero().squeeze(1).tolist())


def feed(matcher: Matcher, text: str) -> Matcher:
    for byte in text.encode():
        matcher.accept(byte)
    return matcher


# ----------------------------------------------------------------------------------------------------------- matchers


@pytest.mark.parametrize("text", ["", "a", "aa", "aab", "aabc"])
def test_the_end_is_allowed_where_the_text_matches_and_nowhere_else(text: str) -> None:
    matcher = feed(start(Structured.regex("a{2,}(bc)?d?")), text)
    assert (EOS in allowed(matcher)) == matcher.can_end == (re.fullmatch("a{2,}(bc)?d?", text) is not None)


def test_exactly_the_tokens_that_can_lead_to_a_match_are_allowed() -> None:
    texts = HERE.tokenizer.decode_each()
    wanted = {
        i for i, text in enumerate(texts) if i not in HERE.tokenizer.added_ids and re.fullmatch("[ a-m]{1,3}", text)
    }
    assert len(wanted) > 20
    assert allowed(start(Structured.regex("[ a-m]{3}"))) == wanted


def test_a_structure_that_cannot_grow_is_done_without_an_end_token() -> None:
    matcher = start(Structured.choice(["ab", "ac"]))
    assert not feed(matcher, "a").is_done
    assert feed(matcher, "b").is_done
    with pytest.raises(InternalError, match="asked for another token"):
        matcher.mask(torch.zeros(400))
    with pytest.raises(InternalError, match="token 98 was sampled"):
        matcher.accept(98)


def test_the_end_token_ends_a_structure_that_could_grow() -> None:
    matcher = feed(start(Structured.regex("a+")), "aa")
    assert (matcher.can_end, matcher.is_done) == (True, False)
    matcher.accept(EOS)
    assert matcher.is_done


@pytest.mark.parametrize("token_id", [98, EOS, 256, 400, -1])
def test_a_token_that_is_not_allowed_is_not_accepted_and_changes_nothing(token_id: int) -> None:
    matcher = start(Structured.regex("aa"))
    with pytest.raises(InternalError, match=f"token {token_id} was sampled"):
        matcher.accept(token_id)
    assert feed(matcher, "aa").is_done


def test_copies_stand_apart() -> None:
    first = feed(start(Structured.regex("a(b|c)d")), "a")
    second = first.copy()
    feed(second, "b")
    assert allowed(first) >= {98, 99}
    assert allowed(second) == {100}
    assert feed(first, "cd").is_done
    assert not second.is_done


def test_states_copy_their_matcher() -> None:
    spec = Structured.regex("ab|ac")
    state = SamplerState(
        SamplingParams(structured=spec), [1], seed=1, eos_token_id=EOS, vocab_size=400, matcher=start(spec)
    )
    child = state.fork(1)
    assert not child.accept(97)
    assert child.accept(98)
    assert allowed(state.matcher) == {97}


def test_answers_of_one_compiled_structure_stand_apart() -> None:
    compiled = compile_structured(Structured.regex("ab"), HERE.vocabulary)
    first, second = compiled.start(), compiled.start()
    feed(first, "a")
    assert (allowed(first), allowed(second)) == ({98}, {97})


def test_masked_logits_keep_their_values_and_wider_rows_have_no_ids_outside_the_tokenizer() -> None:
    logits = torch.arange(410.0)
    start(Structured.regex("[ab]")).mask(logits)
    assert logits[[97, 98]].tolist() == [97.0, 98.0]
    assert int(logits.isfinite().sum()) == 2
    assert allowed(start(Structured.regex("[ab]")), 98) == {97}


def test_a_specification_crosses_processes_and_compiles_to_the_same_there() -> None:
    spec = pickle.loads(pickle.dumps(Structured.json_schema({"enum": ["red", "green"]})))
    other = setting.__wrapped__("synthetic").vocabulary
    here, there = start(spec), compile_structured(spec, other).start()
    for byte in b'"red"':
        assert allowed(here) == allowed(there)
        here.accept(byte)
        there.accept(byte)


def test_a_state_needs_the_matcher_of_its_structure() -> None:
    for params, matcher in (
        (SamplingParams(structured=Structured.regex("a")), None),
        (SamplingParams(), start(Structured.regex("a"))),
    ):
        with pytest.raises(InternalError, match="without a"):
            SamplerState(params, [1], seed=1, eos_token_id=EOS, vocab_size=400, matcher=matcher)


def matcher_with_a_special_token(grammar: str) -> Matcher:
    """Return a matcher of a grammar that compiling refuses."""
    backend = LLMatcher(HERE.vocabulary.compiler_view, LLMatcher.grammar_from_lark(grammar), log_level=0)
    return Matcher(backend, HERE.vocabulary)


def test_a_special_token_is_not_produced_even_if_a_grammar_asks_for_it() -> None:
    matcher = matcher_with_a_special_token('start: <[256]> | <[258]> | "a"')
    assert allowed(matcher) == {97}
    with pytest.raises(InternalError, match="token 256 was sampled"):
        matcher.accept(256)


def test_a_structure_that_fails_in_a_batch_names_its_row_and_the_reason() -> None:
    failing = SamplerState(
        SamplingParams(structured=Structured.regex("a")),
        [1],
        seed=1,
        eos_token_id=EOS,
        vocab_size=400,
        matcher=feed(matcher_with_a_special_token('start: "a" <[256]>'), "a"),
    )
    free = SamplerState(SamplingParams(), [1], seed=1, eos_token_id=EOS, vocab_size=400)
    with pytest.raises(RowError, match="row 1 has no next token: the structure cannot be followed") as failure:
        sample_batch(torch.zeros(2, 400), [free, failing])
    assert failure.value.row == 1
    assert isinstance(failure.value.__cause__, UserError)


def test_a_structure_that_grows_too_complex_is_an_error_and_not_an_end() -> None:
    limits = LLParserLimits(step_max_items=60, verbose_errors=False)
    grammar = LLMatcher.grammar_from_lark('start: s "x"\ns: s s | "a" | "aa" | "aaa"')
    backend = LLMatcher(HERE.vocabulary.compiler_view, grammar, log_level=0, limits=limits)
    matcher = Matcher(backend, HERE.vocabulary)
    with pytest.raises(UserError, match=r"the structure cannot be followed any further: .*limit"):
        for _ in range(50):
            matcher.mask(torch.zeros(400))
            matcher.accept(97)


# ----------------------------------------------------------------------------------------------------------- refusals

NESTED = '{"items": ' * 101 + "{}" + "}" * 101


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "nope"}', "Invalid type: nope"),
        ("json_schema", '{"type": "object", "properties": 5}', "properties must be an object"),
        ("json_schema", '{"$ref": "#/x"}', "Pointer '/x' does not exist"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "does not fetch"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", "[]", "must be an object or boolean"),
        ("json_schema", NESTED, "nests brackets 102 deep; accepted are 100 at most"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"\bx", "lookarounds not supported"),
        ("regex", "a" * (MAX_SPEC_BYTES + 1), "has 65,537 bytes; accepted are 65,536 at most"),
        ("regex", "水" * 30_000, "has 90,000 bytes"),
        ("regex", " ", "the regex is empty"),
        ("regex", "\ud800", "half of a surrogate pair"),
        ("choice", "[]", "one or more strings"),
        ("choice", '["a", ""]', "one or more strings"),
        ("choice", '"a"', "one or more strings"),
        ("choice", "[1]", "one or more strings"),
        ("choice", "a", "the choice is not JSON"),
        ("grammar", "start: x", 'unknown name: "x"'),
        ("grammar", "start: /(/", "unclosed group"),
        ("grammar", "begin: /a/", "start"),
        ("grammar", 'branch ::= "a"', "No 'root' rule found"),
        ("grammar", "a\ufffdb", "the grammar is not accepted"),
        ("grammar", "start: a\na: a", "it allows no answer"),
        ("grammar", 'start: "a" <eos>', "<eos> names a special token, and no answer may hold one"),
        ("grammar", "start: <[256]>", "<[256]> names a special token"),
        ("grammar", 'start: "<a>" <[*]>', "<[*]> names a special token"),
        ("xml", "<a/>", "structured kind is 'xml'; accepted are 'json_schema', 'regex', 'choice', 'grammar'"),
    ],
)
def test_a_bad_structure_is_refused_with_a_sentence(kind: str, text: str, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        compile_structured(Structured(kind, text), HERE.vocabulary)
    message = refusal.value.message
    assert words in message
    assert refusal.value.param == "structured"
    assert "\n" not in message
    assert len(message) < 450


@pytest.mark.parametrize("schema", ["{", "{'a': 1}", ""])
def test_a_schema_that_is_not_json_is_refused(schema: str) -> None:
    with pytest.raises(UserError, match="json_schema is not JSON"):
        Structured.json_schema(schema)


def test_a_schema_that_cannot_be_written_as_json_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be written as JSON"):
        Structured.json_schema({"enum": [object()]})


def test_brackets_beside_each_other_are_not_nested() -> None:
    assert allowed(start(Structured.regex("(a)[b]" * 150))) == {97}


def test_a_schema_may_be_an_object_or_its_text() -> None:
    assert Structured.json_schema('{"type": "null"}') == Structured.json_schema({"type": "null"})


# --------------------------------------------------------------------------------------------------------- vocabularies


def test_tokens_have_the_bytes_of_their_text() -> None:
    for name in ("synthetic", "trained", "released"):
        here = setting(name)
        view = here.vocabulary.compiler_view
        for token_id, text in enumerate(here.tokenizer.decode_each()):
            if here.vocabulary.is_text[token_id] and "\ufffd" not in text:
                assert view.decode_bytes([token_id]) == text.encode()
    ids = setting("released").tokenizer.encode("水车转动 naïve 👩‍👩‍👧‍👦\n")
    assert setting("released").vocabulary.compiler_view.decode_bytes(ids).decode() == "水车转动 naïve 👩‍👩‍👧‍👦\n"


@pytest.mark.parametrize("name", ["synthetic", "trained", "released"])
def test_all_but_added_tokens_are_text(name: str) -> None:
    here = setting(name)
    not_text = {i for i, is_text in enumerate(here.vocabulary.is_text) if not is_text}
    assert not_text == here.tokenizer.added_ids | {here.eos}


def test_a_tokenizer_without_bytes_or_without_the_end_token_is_refused() -> None:
    words = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(UserError, match="needs a byte-level tokenizer"):
        GrammarVocabulary(words, 1)
    with pytest.raises(UserError, match="id 400 is not in the tokenizer"):
        GrammarVocabulary(HERE.tokenizer, 400)
