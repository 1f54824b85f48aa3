"""What an answer must look like: JSON of a schema, a regular expression, one of some texts, a grammar, or tool calls.

Plain text, so that it crosses processes; `structured.py` compiles it on either side.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headrace.core.errors import UserError

MAX_SPEC_BYTES = 64 << 10
MAX_TOOLS_BYTES = 512 << 10  # agents bring many tools, each of them small
MAX_NESTING = 100  # the compiler recurses; text that opens more brackets than this inside each other is refused

Kind = Literal["json_schema", "regex", "choice", "grammar", "tool_calls"]


@dataclass(frozen=True)
class Structured:
    """One description of an answer; use the class methods to make it.

    Attributes:
        kind: what `text` is: "json_schema" (JSON), "regex" (matched whole), "choice" (a JSON list of strings),
            "grammar" (Lark with a rule `start`, or GBNF with a rule `root`) or "tool_calls" (JSON, see `tool_calls`).
        text: the description, at most 64 KiB of UTF-8, or 512 KiB of tools.
        after: special tokens, by their spelling, that must come in this order before the structure begins; what stands
            before and between them is free. Empty where the structure begins at once.
        is_optional: the answer may end before the last token of `after` has come.
    """

    kind: Kind
    text: str
    after: tuple[str, ...] = ()
    is_optional: bool = False

    def __post_init__(self) -> None:
        """Check kind and size; `structured.compile_structured` finds out whether the text means something.

        Raises:
            UserError: not a known kind, no text, or too much of it.
        """
        if self.kind not in get_args(Kind):
            raise _refusal(f"structured kind is {self.kind!r}; accepted are {', '.join(map(repr, get_args(Kind)))}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise _refusal(f"the {self.kind} is empty; accepted is text of one or more characters")
        try:
            num_bytes = len(self.text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise _refusal(f"the {self.kind} holds half of a surrogate pair, which is not Unicode text") from error
        limit = MAX_TOOLS_BYTES if self.kind == "tool_calls" else MAX_SPEC_BYTES
        if num_bytes > limit:
            raise _refusal(f"the {self.kind} has {num_bytes:,} bytes; accepted are {limit:,} at most")
        depth = _nesting(self.text)
        if depth > MAX_NESTING:
            raise _refusal(f"the {self.kind} nests brackets {depth} deep; accepted are {MAX_NESTING} at most")
        object.__setattr__(self, "after", tuple(self.after))
        if not all(isinstance(token, str) and token for token in self.after):
            raise _refusal(f"the {self.kind} begins after {self.after!r}; accepted are spellings of special tokens")
        if self.is_optional and not self.after:
            raise _refusal(f"the {self.kind} is optional and begins at once; accepted is an optional one after a token")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Structured":
        """Ask for a JSON value of a schema, given as an object or as its text.

        Raises:
            UserError: the schema is not JSON, or is too large.
        """
        if isinstance(schema, str):
            _parse("json_schema", schema)
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(f"the json_schema cannot be written as JSON: {error}") from error

    @classmethod
    def json_object(cls) -> "Structured":
        """Ask for any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> "Structured":
        """Ask for a text that a regular expression matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Structured":
        """Ask for one of some texts.

        Raises:
            UserError: there is none, or one is empty or not text.
        """
        spec = cls("choice", json.dumps(list(texts), ensure_ascii=False))
        spec.choices()
        return spec

    @classmethod
    def grammar(cls, text: str) -> "Structured":
        """Ask for a text of a grammar, in Lark's notation (rule `start`) or in GBNF (rule `root`)."""
        return cls("grammar", text)

    @classmethod
    def tool_calls(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        dialect: str = "v4.1",
        is_parallel: bool = True,
        is_opened: bool = True,
    ) -> "Structured":
        """Ask for calls of some tools in the markup of DeepSeek's encodings.

        Args:
            tools: each a mapping with `name` and `parameters`, a JSON schema of an object.
            dialect: "v4.1" or "v4", which spell the markup differently.
            is_parallel: any number of calls from one on; otherwise exactly one.
            is_opened: the prompt ends with the line that opens the block of calls; otherwise the answer stands right
                behind the marker token of that line.

        Raises:
            UserError: a tool cannot be written as JSON, or there are too many.
        """
        kept = [{"name": tool["name"], "parameters": tool["parameters"]} for tool in tools]
        about = {"tools": kept, "dialect": dialect, "is_parallel": is_parallel, "is_opened": is_opened}
        try:
            return cls("tool_calls", json.dumps(about, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(f"the tools cannot be written as JSON: {error}") from error

    def choices(self) -> list[str]:
        """Return the texts of a choice.

        Raises:
            UserError: the text is not a JSON list of strings of one or more characters.
        """
        texts = _parse("choice", self.text)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise _refusal("the choice is not a list of texts; accepted are one or more strings that are not empty")
        return texts


def _parse(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the {kind} is not JSON: {error}") from error


def _nesting(text: str) -> int:
    """Return how deep brackets stand inside each other; those in strings count too, which errs on the safe side."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _refusal(message: str) -> UserError:
    return UserError(message, param="structured")
