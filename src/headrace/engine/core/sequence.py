"""A request while it lives in the engine: its answer, its tokens, its state wherever that is, and what it took."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.cache.block_pool import BLOCK_TOKENS
from headrace.cache.chain import Chain
from headrace.cache.sequence_state import SequenceState
from headrace.cache.swap import Swapped
from headrace.cache.tiers.fetch import Job
from headrace.engine.answer import Answer
from headrace.engine.core.image_rows import PromptImages
from headrace.engine.core.trace import RowCounts
from headrace.engine.core.xray import StepXray
from headrace.engine.logprob_table import LogprobTable, PromptLogprobs
from headrace.engine.result import Result, Timings, Usage, Work
from headrace.engine.submission import Submission


@dataclass
class Sequence:
    """One answer in the engine. Owns its state or its swapped copy; the core moves them.

    `choice` is its number among the answers to its prompt. `published` tokens are findable in the prefix cache, the
    blocks of `kept` and the windows up to `kept_windows` were given to the disk; `load` is what the tiers were asked.
    Rows below `exact_from` only rebuild windows.
    `xray` is what its newest step did, where the request asked. `started`, `first_token`, `last_token` are its times.
    """

    submission: Submission
    request_id: str
    choice: int
    answer: Answer
    chain: Chain
    mode: Literal["full", "replay"]
    can_replay: bool
    images: PromptImages | None = None
    state: SequenceState | None = None
    swapped: Swapped | None = None
    cached_tokens: int = 0
    cached_blocks: dict[str, int] = field(default_factory=dict)
    load: Job | None = None
    kept: int = 0
    kept_windows: int = 0
    exact_from: int = 0
    cache_reason: str | None = None
    is_approximate: bool = False
    is_first_step: bool = True
    published: int = 0
    is_over: bool = False
    preemptions: int = 0
    counts: RowCounts = field(default_factory=RowCounts)
    replayed_rows: int = 0
    draft_rounds: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    prompt_logprobs: LogprobTable = field(default_factory=LogprobTable)
    started: float | None = None
    xray: StepXray | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submission.prompt_ids)

    def note_guesses(self, count: int) -> None:
        """Count the guesses of one round, if there are any."""
        self.draft_rounds += count > 0
        self.drafts_proposed += count

    @property
    def num_committed(self) -> int:
        """Tokens that have, or are about to have, a row in its state: all but the newest of the answer."""
        return self.num_prompt + max(0, len(self.answer.token_ids) - 1)

    @property
    def wants_xray(self) -> bool:
        """Whether the request asked to see what is done for it."""
        return self.answer.params.xray

    @property
    def block_ids(self) -> list[int]:
        """Blocks of its table by place; -1 where a swapped one's block is in host memory."""
        if self.state is not None:
            return list(self.state.table.block_ids)
        if self.swapped is None:
            return []
        kept = self.swapped.kept
        return [kept.get(place, -1) for place in range(len(kept) + len(self.swapped.copied))]

    def result(self, numerics: str) -> Result:
        """Return what was generated and what it took."""
        answer, counts = self.answer, self.counts
        wants_top = bool(answer.params.top_logprobs)
        wants_prompt = answer.params.num_prompt_alternatives is not None
        return Result(
            text=answer.text,
            token_ids=list(answer.token_ids),
            logprobs=list(answer.logprobs) if answer.params.logprobs else None,
            finish_reason=answer.finish_reason or "length",
            usage=Usage(
                prompt_tokens=self.num_prompt,
                completion_tokens=len(answer.token_ids),
                cached_tokens=self.cached_tokens,
                cached_tokens_by_tier=self.cached_by_tier,
            ),
            seed=answer.sampler.seed,
            stop=answer.stop,
            token_logprobs=answer.token_logprobs if wants_top else None,
            prompt_logprobs=PromptLogprobs(self.prompt_logprobs) if wants_prompt else None,
            cache_reason=self.cache_reason,
            is_approximate=self.is_approximate,
            numerics=numerics,
            timings=self._timings(),
            work=Work(
                layer_rows=counts.layer_rows,
                producer_rows=counts.producer_rows,
                index_scored=counts.index_scored,
                index_scored_by_layer=dict(counts.index_scored_by_layer),
                replayed_rows=self.replayed_rows,
                reencoded_rows=counts.reencoded_rows,
                preemptions=self.preemptions,
                draft_rounds=self.draft_rounds,
                drafts_proposed=self.drafts_proposed,
                drafts_accepted=self.drafts_accepted,
            ),
        )

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Cached tokens by tier; those of a block that is cached in part were on the device."""
        if not self.cached_tokens:
            return {}
        found = {name: BLOCK_TOKENS * count for name, count in self.cached_blocks.items()}
        found["device"] = self.cached_tokens - sum(count for name, count in found.items() if name != "device")
        return found

    def _timings(self) -> Timings:
        submitted = self.submission.submitted
        started = submitted if self.started is None else self.started
        first = started if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        return Timings(
            queue_s=max(0.0, started - submitted),
            prefill_s=first - started,
            decode_s=last - first,
            ttft_s=first - submitted,
        )
