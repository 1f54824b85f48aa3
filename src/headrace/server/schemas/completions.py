"""The body of `/v1/completions`, and what it asks of the engine."""

from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.core.errors import UserError
from headrace.engine.sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from headrace.engine.sampling.spec import Structured
from headrace.server.schemas.body import Body
from headrace.server.schemas.extensions import biases, stops

MAX_CHOICES = 128
_DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = Field(default=False, description="a last event with token counts")


class StructuredOutputs(Body):
    """What the text must look like: exactly one of these."""

    json_schema: dict[str, Any] | bool | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, description="a regular expression that matches all of it")
    choice: list[str] | None = Field(default=None, description="texts of which it is one")
    grammar: str | None = Field(default=None, description="a grammar in the notation of Lark or GBNF")

    def structured(self) -> Structured:
        """Return the structure.

        Raises:
            UserError: none or several are named, or one is refused.
        """
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(
                f"structured_outputs names {len(given)} structures; accepted is exactly one of json, regex, choice and "
                "grammar",
                param="structured_outputs",
            )
        make = getattr(Structured, given[0])
        found: Structured = make(getattr(self, given[0]))
        return found


class CompletionRequest(Body):
    """The body of `/v1/completions`."""

    model: str | None = Field(default=None, description="the served model")
    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: int = Field(default=_DEFAULT_MAX_TOKENS, ge=0, description="0 only with echo")
    temperature: float | None = None
    top_p: float = 1.0
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, description="accepted only where it equals n")
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    stop: str | list[str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = Field(default=None, description="a label; changes nothing")
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputs | None = None
    mode: Literal["full", "replay"] | None = Field(default=None, description="how the prompt is read")
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, description="higher goes first")
    cache_salt: str | None = Field(default=None, max_length=256, description="cached prompts are shared only within")
    xray: bool = Field(default=False, description="keep an x-ray of the answer, see /v1/xray/{id}")

    def prompts(self) -> list[str | list[int]]:
        """Return one or many prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def check(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            UserError: the first two that do not.
        """
        count = len(self.prompts()) * self.n
        if count > MAX_CHOICES:
            raise UserError(f"{count} answers are asked for; accepted are {MAX_CHOICES} at most", param="n")
        if self.best_of is not None and self.best_of != self.n:
            raise UserError(f"best_of is {self.best_of}; accepted is only n, here {self.n}", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise UserError("max_tokens is 0; accepted is 1 or more, or 0 with echo", param="max_tokens")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options is accepted only with stream: true", param="stream_options")
        if self.stream and self.echo and self.logprobs is not None:
            raise UserError("echo with logprobs is accepted only without stream", param="stream")
        if self.xray and count > 1:
            raise UserError(f"xray is accepted for one answer, and {count} are asked for", param="xray")

    def sampling(self, *, default_temperature: float, cache_salt: str | None) -> SamplingParams:
        """Return what the engine is to do for each prompt.

        Raises:
            UserError: a value is refused.
        """
        wants_prompt = self.echo and self.logprobs is not None
        if wants_prompt and self.mode == "replay":
            raise UserError("echo with logprobs needs mode 'full'; accepted is that or none", param="mode")
        return SamplingParams(
            max_tokens=max(1, self.max_tokens),
            min_tokens=self.min_tokens,
            temperature=default_temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=biases(self.logit_bias),
            seed=self.seed,
            stop=stops(self.stop),
            stop_token_ids=self.stop_token_ids or (),
            n=self.n,
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            prompt_logprobs=self.logprobs if wants_prompt else None,
            ignore_eos=self.ignore_eos,
            structured=None if self.structured_outputs is None else self.structured_outputs.structured(),
            mode=self.mode,
            priority=self.priority,
            cache_salt=cache_salt,
            xray=self.xray,
        )
