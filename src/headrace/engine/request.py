"""One request while it runs, and what it gives back."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.cache.sequence_state import SequenceState
from headrace.engine.sampler import SamplingParams, draw_seed
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
    params: SamplingParams
    state: SequenceState
    eos_token_id: int
    limit: int
    detokenizer: Detokenizer | None
    stops: StopChecker | None
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    @classmethod
    def start(
        cls,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        state: SequenceState,
        tokenizer: Tokenizer | None,
        *,
        eos_token_id: int,
        limit: int,
    ) -> "Running":
        """Begin a request; `limit` is the longest sequence the context allows."""
        state.reserve(min(limit, len(prompt_ids) + min(params.max_tokens, _RESERVED_TOKENS)))
        return cls(
            prompt_ids=prompt_ids,
            params=params,
            state=state,
            eos_token_id=eos_token_id,
            limit=limit,
            detokenizer=Detokenizer(tokenizer, skip_special_tokens=True) if tokenizer else None,
            stops=StopChecker(params.stop) if params.stop else None,
            seed=draw_seed() if params.seed is None else params.seed,
        )

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt_ids) + len(self.token_ids)

    def accept(self, token_id: int, logprob: float | None) -> str:
        """Take a generated token and return the text that is now certain."""
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token_id == self.eos_token_id and not self.params.ignore_eos:
            self.finish_reason = "stop"
            piece = self._check_stops(self.detokenizer.flush() if self.detokenizer else "", is_last=True)
        else:
            is_full = len(self.token_ids) >= self.params.max_tokens or self.position >= self.limit
            piece = self.detokenizer.push(token_id) if self.detokenizer else ""
            if is_full:
                piece += self.detokenizer.flush() if self.detokenizer else ""
            piece = self._check_stops(piece, is_last=is_full)
            if is_full and self.finish_reason is None:
                self.finish_reason = "length"
        self.text += piece
        return piece

    def _check_stops(self, piece: str, *, is_last: bool) -> str:
        if self.stops is None:
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
            seed=self.seed,
        )
