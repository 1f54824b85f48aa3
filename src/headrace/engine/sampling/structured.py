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
from headrace.engine.sampling.vocabulary import GrammarVocabulary

_MAX_REASON_CHARACTERS = 300
# a grammar's comment, text or pattern: where "<" is an ordinary character
_LARK_PLAIN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')
_SPECIAL_TOKEN = re.compile(r"<[^>\s]*>?")


class Matcher:
    """Owns where one answer stands in its structure."""

    def __init__(self, backend: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        """Take over a library matcher."""
        self._backend = backend
        self._vocabulary = vocabulary

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
        return Matcher(self._backend.deep_copy(), self._vocabulary)

    def _may_follow(self, token_id: int) -> bool:
        is_known = self._vocabulary.is_text[token_id] or token_id == self._vocabulary.eos_token_id
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
        allowed &= self._vocabulary.is_text
        allowed[self._vocabulary.eos_token_id] = may_end
        if not allowed.any():
            raise _refusal("the structure cannot be followed any further", "no token of the vocabulary fits")
        return allowed


class Compiled:
    """Owns a compiled structure; every answer starts a matcher of its own. May be shared between threads."""

    def __init__(self, spec: Structured, backend: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        """Take over a library matcher that has seen no token."""
        self.spec = spec
        self._backend = backend
        self._vocabulary = vocabulary

    def start(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        return Matcher(self._backend.deep_copy(), self._vocabulary)


def compile_structured(spec: Structured, vocabulary: GrammarVocabulary) -> Compiled:
    """Compile a structure.

    Raises:
        UserError: the schema, pattern or grammar is not valid, asks for what is not supported, matches nothing, or is
            too complex.
    """
    grammar = _grammar(spec)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.compiler_view, limits=limits)
    if messages:  # a warning says that a part of the description would be ignored
        raise _refusal(f"the {spec.kind} is not accepted", messages[0])
    backend = LLMatcher(vocabulary.compiler_view, grammar, log_level=0, limits=limits)
    if backend.is_error():
        raise _refusal(f"the {spec.kind} is not accepted", backend.get_error())
    compiled = Compiled(spec, backend, vocabulary)
    try:
        compiled.start().mask(torch.zeros(vocabulary.size))
    except UserError as error:
        raise _refusal(f"the {spec.kind} is not accepted: it allows no answer", error.message) from error
    return compiled


def _grammar(spec: Structured) -> str:
    """Return a structure in the library's own notation."""
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
