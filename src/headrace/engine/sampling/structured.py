"""Makes answers follow a structure: compiled once, off the step, then a mask of allowed tokens for every next one.

The engine's process compiles beside its loop and refuses what is wrong before the request is queued; compiled objects
do not cross processes.
"""

import json
import re

import llguidance
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from headrace.core.errors import InternalError, UserError
from headrace.engine.sampling.spec import Structured
from headrace.engine.sampling.tool_grammar import MARKER, tool_grammar
from headrace.engine.sampling.vocabulary import GrammarVocabulary

_MAX_REASON_CHARACTERS = 300
# a grammar's comment, text or pattern: where "<" is an ordinary character
_LARK_PLAIN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')
_SPECIAL_TOKEN = re.compile(r"<[^>\s]*>?")


class Matcher:
    """Owns where one answer stands in its structure."""

    def __init__(self, backend: LLMatcher, vocabulary: GrammarVocabulary, marks: tuple[int, ...] = ()) -> None:
        """Take over a library matcher; `marks` are the special tokens that its structure may hold."""
        self._backend = backend
        self._vocabulary = vocabulary
        self._marks = marks

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow: end of sequence was accepted, or the structure is complete and cannot grow."""
        return bool(self._backend.is_stopped())

    @property
    def can_end(self) -> bool:
        """Whether the answer so far is complete."""
        return bool(self._backend.is_accepting())

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that must not come next to -inf, in place; end of sequence only where it may be.

        Args:
            logits_V: [V] float32; ids outside the tokenizer are never allowed.

        Raises:
            UserError: no token is allowed, or the structure became too complex to follow.
        """
        allowed = self._allowed()
        size = min(len(logits_V), len(allowed))
        logits_V[:size].masked_fill_(torch.from_numpy(~allowed[:size]).to(logits_V.device), -torch.inf)
        logits_V[size:] = -torch.inf

    def accept(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            InternalError: the token is not allowed here.
            UserError: the structure became too complex to follow.

        State: advances; after an error the matcher is of no use.
        """
        if not 0 <= token_id < self._vocabulary.size or not self._may_follow(token_id):
            raise InternalError(f"token {token_id} was sampled, and the request's structure does not allow it there")
        if not self._backend.consume_token(token_id) or self._backend.is_error():
            raise _refusal("the structure cannot be followed any further", self._backend.get_error())

    def copy(self) -> "Matcher":
        """Return an independent copy."""
        return Matcher(self._backend.deep_copy(), self._vocabulary, self._marks)

    def _may_follow(self, token_id: int) -> bool:
        is_known = self._vocabulary.is_text[token_id] or token_id in (self._vocabulary.eos_token_id, *self._marks)
        return bool(is_known) and not self.is_done and self._backend.validate_tokens([token_id]) == 1

    def _allowed(self) -> np.ndarray:
        """Return which tokens may come next, [size] bool."""
        if self.is_done:
            raise InternalError("an answer whose structure is complete was asked for another token")
        bits = np.frombuffer(self._backend.compute_bitmask(), dtype=np.uint8)
        allowed: np.ndarray = np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].astype(np.bool_)
        # a matcher that gives up allows the end of sequence; only a complete answer may end
        if self._backend.is_error() or (self._backend.is_stopped() and not self._backend.is_accepting()):
            raise _refusal("the structure cannot be followed any further", self._backend.get_error())
        may_end = bool(allowed[self._vocabulary.eos_token_id]) and self.can_end
        marks = [token_id for token_id in self._marks if allowed[token_id]]
        allowed &= self._vocabulary.is_text
        allowed[self._vocabulary.eos_token_id] = may_end
        allowed[marks] = True
        if not allowed.any():
            raise _refusal("the structure cannot be followed any further", "no token of the vocabulary fits")
        return allowed


class LateMatcher(Matcher):
    """Owns where one answer stands before and in a structure that begins after some special tokens.

    Until the last of them has come every token is free, except that the answer must not end there unless the structure
    is optional.
    """

    def __init__(self, inner: Matcher, waits_for: tuple[int, ...], *, is_optional: bool, eos_token_id: int) -> None:
        """Take over the matcher of the structure and the tokens it comes after, in their order."""
        self._inner = inner
        self._waits_for = waits_for
        self._is_optional = is_optional
        self._eos_token_id = eos_token_id
        self._has_ended = False

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow."""
        return self._has_ended or (not self._waits_for and self._inner.is_done)

    @property
    def can_end(self) -> bool:
        """Whether the answer so far is complete."""
        return self._may_end_early if self._waits_for else self._inner.can_end

    @property
    def _may_end_early(self) -> bool:
        return self._is_optional and len(self._waits_for) == 1

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that must not come next to -inf, in place; see `Matcher.mask`."""
        if not self._waits_for:
            self._inner.mask(logits_V)
        elif not self._may_end_early:
            logits_V[self._eos_token_id] = -torch.inf

    def accept(self, token_id: int) -> None:
        """Take the next token; see `Matcher.accept`."""
        if not self._waits_for:
            self._inner.accept(token_id)
        elif token_id == self._waits_for[0]:
            self._waits_for = self._waits_for[1:]
        elif token_id == self._eos_token_id:
            if not self._may_end_early:
                raise InternalError("an answer ended before its structure began")
            self._has_ended = True

    def copy(self) -> "LateMatcher":
        """Return an independent copy."""
        other = LateMatcher(
            self._inner.copy(), self._waits_for, is_optional=self._is_optional, eos_token_id=self._eos_token_id
        )
        other._has_ended = self._has_ended
        return other


class Compiled:
    """Owns a compiled structure; every answer starts a matcher of its own. May be shared between threads."""

    def __init__(self, spec: Structured, backend: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        """Take over a library matcher that has seen no token.

        Raises:
            UserError: the tokenizer has not the special tokens that the structure needs.
        """
        self.spec = spec
        self._backend = backend
        self._vocabulary = vocabulary
        self._marks = (vocabulary.special_id(MARKER),) if spec.kind == "tool_calls" else ()
        self._waits_for = tuple(vocabulary.special_id(token) for token in spec.after)

    def start(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        inner = self.start_inside()
        if not self._waits_for:
            return inner
        return LateMatcher(
            inner,
            self._waits_for,
            is_optional=self.spec.is_optional,
            eos_token_id=self._vocabulary.eos_token_id,
        )

    def start_inside(self) -> Matcher:
        """Return a matcher at the beginning of the structure itself."""
        return Matcher(self._backend.deep_copy(), self._vocabulary, self._marks)


def compile_structured(spec: Structured, vocabulary: GrammarVocabulary) -> Compiled:
    """Compile a structure.

    Raises:
        UserError: the schema, pattern or grammar is not valid, asks for what is not supported, matches nothing, or is
            too complex.
    """
    grammar = _grammar(spec, vocabulary)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.compiler_view, limits=limits)
    if messages:  # a warning says that a part of the description would be ignored
        raise _refusal(f"the {spec.kind} is not accepted", messages[0])
    backend = LLMatcher(vocabulary.compiler_view, grammar, log_level=0, limits=limits)
    if backend.is_error():
        raise _refusal(f"the {spec.kind} is not accepted", backend.get_error())
    compiled = Compiled(spec, backend, vocabulary)
    try:
        compiled.start_inside().mask(torch.zeros(vocabulary.size))
    except UserError as error:
        raise _refusal(f"the {spec.kind} is not accepted: it allows no answer", error.message) from error
    return compiled


def _grammar(spec: Structured, vocabulary: GrammarVocabulary) -> str:
    """Return a structure in the library's own notation."""
    if spec.kind == "tool_calls":
        return str(LLMatcher.grammar_from_lark(tool_grammar(spec.text, vocabulary.special_id(MARKER))))
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "choice":
        # Lark quotes as JSON does, as long as everything unusual is escaped
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in spec.choices())))
    if spec.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(spec.text))
    rules = _LARK_PLAIN.sub(" ", spec.text)
    if "::=" in rules:
        try:
            return str(llguidance.grammar_from("gbnf", spec.text))
        except ValueError as error:
            raise _refusal("the grammar is not accepted", str(error)) from error
    found = _SPECIAL_TOKEN.search(rules)
    if found is not None:
        raise _refusal(
            "the grammar is not accepted", f"{found.group()} names a special token, and no answer may hold one"
        )
    return str(LLMatcher.grammar_from_lark(spec.text))


def _refusal(what: str, reason: str) -> UserError:
    """Return an error of one sentence; the library's reasons have lines that point into the source with a caret."""
    reason = reason.partition("; following special tokens")[0]
    lines = (line.strip() for line in reason.splitlines())
    kept = [line for line in lines if line and line.strip("^") and not re.match(r"\d+ \|", line)]
    reason = " ".join(kept) or "no reason was given"
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason[:_MAX_REASON_CHARACTERS] + "..."
    return UserError(f"{what}: {reason}", param="structured")
