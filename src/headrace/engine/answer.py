"""One answer while it is generated: sampling state, text, stops, log-probabilities."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headrace.engine.logprob_table import LogprobTable
from headrace.engine.result import FinishReason
from headrace.engine.sampling.logprobs import log_probability, token_logprob
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.text.detokenize import Detokenizer
from headrace.text.stops import StopChecker
from headrace.text.tokenizer import Tokenizer


@dataclass
class Answer:
    """Owns everything that was generated for one answer; knows nothing of the model's state."""

    prompt_ids: np.ndarray
    sampler: SamplerState
    tokenizer: Tokenizer | None
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_logprobs: LogprobTable = field(default_factory=LogprobTable)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    def __post_init__(self) -> None:
        params = self.sampler.params
        self._detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=True) if self.tokenizer else None
        self._stops = StopChecker(params.stop) if params.stop else None

    @property
    def params(self) -> SamplingParams:
        """What the request asked for."""
        return self.sampler.params

    @property
    def newest_logprob(self) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Log-probability of the newest token and its alternatives; None and () where they were not asked for."""
        if not self.params.logprobs:
            return None, ()
        return self.logprobs[-1], self.token_logprobs[-1].top if self.params.top_logprobs else ()

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.prompt_ids) + len(self.token_ids)

    def fork(self, index: int) -> "Answer":
        """Return another answer to the same prompt, nothing of which is generated yet."""
        return Answer(self.prompt_ids, self.sampler.fork(index), self.tokenizer, self.limit)

    def take(self, token_id: int, logits_V: Tensor) -> str:
        """Take a generated token with the logits it came from, and return the text that is now certain.

        Raises:
            UserError: the structure became too complex to follow.
        """
        is_end = self.sampler.accept(token_id)
        self.token_ids.append(token_id)
        self._note(token_id, logits_V)
        is_full = len(self.token_ids) >= self.params.max_tokens or self.position >= self.limit
        is_last = is_end or is_full
        piece = ""
        if self._detokenizer is not None:
            piece = "" if token_id in self.sampler.end_ids else self._detokenizer.push(token_id)
            piece += self._detokenizer.flush() if is_last else ""
        piece = self._until_stop(piece, is_last=is_last)
        if is_end and self.finish_reason is None:
            self.finish_reason = "stop"
            self.stop = token_id if token_id in self.params.stop_token_ids else None
        elif is_full and self.finish_reason is None:
            self.finish_reason = "length"
        self.text += piece
        return piece

    def end(self, reason: FinishReason) -> str:
        """End from outside; return the text that was held back."""
        piece = self._detokenizer.flush() if self._detokenizer is not None and self.token_ids else ""
        piece = self._until_stop(piece, is_last=True)
        self.text += piece
        self.finish_reason = reason
        return piece

    def _note(self, token_id: int, logits_V: Tensor) -> None:
        if not self.params.logprobs:
            return
        if self.params.top_logprobs:
            found = token_logprob(logits_V, token_id, self.params.top_logprobs)
            self.token_logprobs.extend([found])
            self.logprobs.append(found.logprob)
        else:
            self.logprobs.append(log_probability(logits_V, token_id))

    def _until_stop(self, piece: str, *, is_last: bool) -> str:
        # text that came before `min_tokens` ends nothing, not even as the beginning of a stop string
        if self._stops is None or len(self.token_ids) < self.params.min_tokens:
            return piece
        safe, has_stopped = self._stops.push(piece)
        if has_stopped:
            self.finish_reason, self.stop = "stop", self._stops.matched
            return safe
        return safe + self._stops.flush() if is_last else safe
