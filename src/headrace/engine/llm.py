"""`LLM`: load a checkpoint and answer prompts in this process, one or many at once.

Prompts are read one after the other in chunks, then all running requests decode together, one token each a step.
A request's answer does not depend on what runs beside it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.core.chunk_plan import plan_chunks
from headrace.core.errors import CapacityError, UserError
from headrace.engine.request import Result, Running
from headrace.engine.sampling.logprobs import log_probability
from headrace.engine.sampling.noise import draw_seed
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.pipeline import sample
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import Matcher, compile_structured
from headrace.engine.sampling.vocabulary import GrammarVocabulary
from headrace.engine.threads import check_threads, choose_threads
from headrace.models.deepseek_v41.batch import Mode, Span, Work
from headrace.models.deepseek_v41.load import LoadOptions, load_model

Prompt = str | Sequence[int]
DEFAULT_CHUNK = 1024
_NOT_SERVED = ("n", "top_logprobs", "prompt_logprobs", "priority", "deadline_s", "resume", "mode", "cache_salt")


@dataclass
class Timings:
    """Seconds spent, summed over requests; `ttft_s` is the time to the first token of the newest request."""

    load_s: float = 0.0
    image_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True)
class Piece:
    """New text of prompt `index` in a batch; `result` comes with its last piece."""

    index: int
    text: str
    token_id: int
    result: Result | None = None


@dataclass
class _Counters:
    timings: Timings = field(default_factory=Timings)
    work: Work = field(default_factory=Work)


class LLM:
    """A loaded model that answers prompts. Owns the model; every call owns its sequences."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        mode: Mode = "replay",
        chunk: int = DEFAULT_CHUNK,
        threads: int | None = None,
        load: LoadOptions | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Load a checkpoint folder.

        Args:
            path: the folder; None is the model that ships with the package, once there is one.
            mode: "replay" runs the decoder on the last window of a prompt only, "full" on all of it.
            chunk: prompt tokens per forward pass; changes time and memory, never the answer.
            threads: PyTorch threads; None chooses.
            load: what to load and where.
            progress: called with bytes read while loading.

        Raises:
            UserError: an option or the checkpoint is refused.
        """
        if path is None:
            raise UserError("no model ships with this version, so a path is needed: a checkpoint folder", param="path")
        if mode not in {"replay", "full"}:
            raise UserError(f"mode is {mode!r}; accepted are 'replay' and 'full'", param="mode")
        if chunk < 1:
            raise UserError(f"a chunk of {chunk} tokens is not possible; accepted is 1 or more", param="chunk")
        if threads is not None:
            check_threads(threads)
        self.mode = mode
        self._chunk = chunk
        self._counters = _Counters()
        self._vocabulary: GrammarVocabulary | None = None  # built when the first structure is asked for
        started = time.perf_counter()
        loaded = load_model(path, load, progress)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._threads = choose_threads(self.model.config.hidden_size, threads)
        self.timings.load_s = time.perf_counter() - started

    @property
    def timings(self) -> Timings:
        """Time spent so far."""
        return self._counters.timings

    @property
    def work(self) -> Work:
        """What was computed so far."""
        return self._counters.work

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the weights; the object cannot be used after."""
        self.__dict__.pop("model", None)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt's token ids, [N] int64; text gets the beginning-of-sequence token in front.

        Raises:
            UserError: the prompt is empty, has ids outside the vocabulary, or is text without a tokenizer.
            CapacityError: it is longer than the context.
        """
        config = self.model.config
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("the checkpoint has no tokenizer.json, so only token ids are accepted", param="prompt")
            ids = self.tokenizer.encode(prompt)
            if ids[:1] != [config.bos_token_id]:
                ids = [config.bos_token_id, *ids]
        else:
            ids = list(prompt)
            for index, token_id in enumerate(ids):
                if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                    raise UserError(f"token id {token_id!r} at index {index} is not a whole number", param="prompt")
                if not 0 <= token_id < config.vocab_size:
                    raise UserError(
                        f"token id {token_id} at index {index} is not in the vocabulary; "
                        f"accepted are 0 to {config.vocab_size - 1}",
                        param="prompt",
                    )
        if not ids:
            raise UserError("the prompt is empty; at least one token is needed", param="prompt")
        if len(ids) > config.max_positions:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens; the model's context is {config.max_positions} tokens",
                param="prompt",
            )
        return np.asarray(ids, dtype=np.int64)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answer one or many prompts; returns one result each, in order.

        Args:
            prompts: text or a list of token ids, or a list of those.
            params: one for all, or one each; greedy by default.

        Raises:
            UserError: a prompt or parameter is refused.
        """
        results: dict[int, Result] = {}
        for piece in self.stream(prompts, params):
            if piece.result is not None:
                results[piece.index] = piece.result
        return [results[index] for index in sorted(results)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_prefill: Callable[[int], object] | None = None,
    ) -> Iterator[Piece]:
        """Answer prompts and yield text as it becomes certain.

        Args:
            prompts: as in `generate`.
            params: as in `generate`.
            on_prefill: called with the number of prompt tokens read since its last call.
        """
        many = _as_list(prompts)
        each = _as_params(params, len(many))
        ids = [self.encode(prompt) for prompt in many]
        samplers = [self._sampler(prompt, one) for prompt, one in zip(ids, each, strict=True)]
        return self._run(ids, samplers, on_prefill)

    def _run(
        self,
        prompts: list[np.ndarray],
        samplers: list[SamplerState],
        on_prefill: Callable[[int], object] | None,
    ) -> Iterator[Piece]:
        running: dict[int, Running] = {}
        for index, (ids, sampler) in enumerate(zip(prompts, samplers, strict=True)):
            request = self._start(ids, sampler)
            started = time.perf_counter()
            logits = self._prefill(request, on_prefill)
            piece = self._advance(request, logits, index)
            self.timings.ttft_s = time.perf_counter() - started
            if piece.result is None:
                running[index] = request
            yield piece
        while running:
            started = time.perf_counter()
            self._use_threads(self._threads.decode)
            spans = [
                Span(request.state, np.array(request.token_ids[-1:], dtype=np.int64), decoder_rows=1)
                for request in running.values()
            ]
            logits = self.model.forward(spans, work=self.work).logits
            pieces = [
                self._advance(request, row, index)
                for (index, request), row in zip(running.items(), logits, strict=True)
            ]
            self.timings.decode_s += time.perf_counter() - started
            for piece in pieces:
                if piece.result is not None:
                    del running[piece.index]
            yield from pieces

    def _sampler(self, ids: np.ndarray, params: SamplingParams) -> SamplerState:
        """Return the sampling state at the end of a prompt.

        Raises:
            UserError: the engine does not serve what is asked, an id is not in the vocabulary, a structure is refused.
        """
        for name in _NOT_SERVED:
            if getattr(params, name) != getattr(SamplingParams(), name):
                raise UserError(f"{name} is {getattr(params, name)!r}; this engine does not serve it yet", param=name)
        config = self.model.config
        return SamplerState(
            params,
            ids,
            seed=draw_seed() if params.seed is None else params.seed,
            eos_token_id=config.eos_token_id,
            vocab_size=config.vocab_size if self.tokenizer is None else min(config.vocab_size, self.tokenizer.size),
            matcher=self._matcher(params),
        )

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structured is None:
            return None
        if self.tokenizer is None:
            raise UserError("the checkpoint has no tokenizer.json, so no structure can be asked for", "structured")
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(self.tokenizer, self.model.config.eos_token_id)
        return compile_structured(params.structured, self._vocabulary).start()

    def _start(self, ids: np.ndarray, sampler: SamplerState) -> Running:
        state, limit = self.model.new_state(), self.model.config.max_positions
        return Running.start(ids, sampler, state, self.tokenizer, limit=limit)

    def _prefill(self, request: Running, on_prefill: Callable[[int], object] | None) -> torch.Tensor:
        """Read the prompt and return the logits [V] of its last token."""
        started = time.perf_counter()
        self._use_threads(self._threads.prefill)
        ids, window = request.prompt_ids, self.model.config.window
        is_replay = self.mode == "replay"
        sizes = plan_chunks(len(ids), self._chunk, window if is_replay else 1)
        low, logits = 0, torch.empty(0)
        for place, size in enumerate(sizes):
            is_last = place == len(sizes) - 1
            decoder_rows = size if not is_replay else min(window, len(ids)) if is_last else 0
            span = Span(request.state, ids[low : low + size], decoder_rows, is_replay=is_replay and is_last)
            logits = self.model.forward([span], work=self.work).logits
            low += size
            if on_prefill is not None:
                on_prefill(size)
        self.timings.prefill_s += time.perf_counter() - started
        return logits[-1]

    def _advance(self, request: Running, logits_V: torch.Tensor, index: int) -> Piece:
        """Sample one token and take it."""
        if self.tokenizer is not None and self.tokenizer.size < logits_V.shape[0]:
            logits_V = logits_V[: self.tokenizer.size]  # ids without a token are never sampled
        token_id = sample(logits_V, request.sampler)
        logprob = log_probability(logits_V, token_id) if request.params.logprobs else None
        text = request.accept(token_id, logprob)
        return Piece(index, text, token_id, request.result() if request.finish_reason else None)

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many: list[Prompt] = []
    ids: list[int] = []
    for item in prompts:
        if isinstance(item, int | np.integer):
            ids.append(int(item))
        else:
            many.append(item)
    if ids and many:
        raise UserError(
            "the prompts mix token ids and whole prompts; one list of ids, or a list of prompts, is accepted"
        )
    if not ids and not many:
        raise UserError("no prompt was given; text or at least one token id is needed", param="prompts")
    return [ids] if ids else many


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{len(params)} sampling parameters were given for {count} prompts", param="params")
    return list(params)
