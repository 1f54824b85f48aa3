"""One request while it runs, and what it gives back."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.cache.sequence_state import SequenceState
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.text.detokenize import Detokenizer
from headrace.text.stops import StopChecker
from headrace.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]
_RESERVED_TOKENS = 1024  # room made for an answer before it starts; longer ones grow the stores


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts: of the prompt, generated, and of the prompt taken from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished request. `logprobs` has one entry per generated token, None if not asked for."""

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    usage: Usage
    seed: int


@dataclass
class Running:
    """A request in progress. Owns its sequence state and everything that was generated."""

    prompt_ids: np.ndarray
    sampler: SamplerState
    state: SequenceState
    limit: int
    detokenizer: Detokenizer | None
    stops: StopChecker | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    @classmethod
    def start(
        cls,
        prompt_ids: np.ndarray,
        sampler: SamplerState,
        state: SequenceState,
        tokenizer: Tokenizer | None,
        *,
        limit: int,
    ) -> "Running":
        """Begin a request; `sampler` stands at the end of the prompt, `limit` is the longest sequence possible."""
        params = sampler.params
        state.reserve(min(limit, len(prompt_ids) + min(params.max_tokens, _RESERVED_TOKENS)))
        return cls(
            prompt_ids=prompt_ids,
            sampler=sampler,
            state=state,
            limit=limit,
            detokenizer=Detokenizer(tokenizer, skip_special_tokens=True) if tokenizer else None,
            stops=StopChecker(params.stop) if params.stop else None,
        )

    @property
    def params(self) -> SamplingParams:
        """What the request asked for."""
        return self.sampler.params

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt_ids) + len(self.token_ids)

    def accept(self, token_id: int, logprob: float | None) -> str:
        """Take a generated token and return the text that is now certain."""
        is_end = self.sampler.accept(token_id)
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        is_full = len(self.token_ids) >= self.params.max_tokens or self.position >= self.limit
        is_last = is_end or is_full
        piece = ""
        if self.detokenizer is not None:
            piece = "" if token_id in self.sampler.end_ids else self.detokenizer.push(token_id)
            piece += self.detokenizer.flush() if is_last else ""
        piece = self._check_stops(piece, is_last=is_last)
        if is_end:
            self.finish_reason = "stop"
        elif is_full and self.finish_reason is None:
            self.finish_reason = "length"
        self.text += piece
        return piece

    def _check_stops(self, piece: str, *, is_last: bool) -> str:
        # text that came before `min_tokens` ends nothing, not even as the beginning of a stop string
        if self.stops is None or len(self.token_ids) < self.params.min_tokens:
            return piece
        safe, has_stopped = self.stops.push(piece)
        if has_stopped:
            self.finish_reason = "stop"
            return safe
        return safe + self.stops.flush() if is_last else safe

    def result(self) -> Result:
        """Return what was generated."""
        return Result(
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs) if self.params.logprobs else None,
            finish_reason=self.finish_reason or "length",
            usage=Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.token_ids)),
            seed=self.sampler.seed,
        )
