"""`LLM`: prompts in, text out. The front of an engine that runs in a process of its own."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.core.errors import CapacityError, EngineError, HeadraceError, UserError
from headrace.core.shipped import shipped_model
from headrace.engine.core.events import PrefillEvent, TokenEvent
from headrace.engine.core.options import EngineOptions
from headrace.engine.images import ImagePrompt, PlacedImage, place_images
from headrace.engine.process.client import EngineClient, Tell
from headrace.engine.process.messages import Question, Setup
from headrace.engine.prompt import Prompt, as_params, as_prompts, check_ids
from headrace.engine.result import Piece, Result
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.seed import draw_seed
from headrace.engine.submission import Submission
from headrace.models.deepseek_v41.config import load_config
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.core.trace import StepTrace
    from headrace.models.deepseek_v41.load import LoadOptions


@dataclass
class Timings:
    """Seconds, of all requests so far; `ttft_s` is the time to the first token of the newest finished request."""

    load_s: float = 0.0
    image_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0


class LLM:
    """A model that answers prompts, from any number of threads at once. Owns the engine's process."""

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        load: "LoadOptions | None" = None,
        progress: Callable[[int], object] | None = None,
        **options: Any,
    ) -> None:
        """Load a checkpoint folder.

        Args:
            path: the folder; None is headrace-nano, the model that ships with the package.
            load: what to load and where.
            progress: called with bytes read while loading.
            options: fields of `EngineOptions`: `mode`, `resume`, `chunk`, `threads`, `num_slots`, `max_memory`, ...

        Raises:
            UserError: an option or the checkpoint is refused.
        """
        self.options = _options(options)
        folder = shipped_model() if path is None else Path(path)
        self.config = load_config(folder)
        file = folder / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(file) if file.exists() else None
        self.timings = Timings()
        self._lock = threading.Lock()
        started = time.perf_counter()
        self._client: EngineClient | None = EngineClient(Setup(path=folder, options=self.options, load=load), progress)
        self.timings.load_s = time.perf_counter() - started

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine; the object cannot be used after."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def mode(self) -> Literal["full", "replay"]:
        """How prompts are read where a request does not say."""
        return self.options.mode

    @property
    def numerics(self) -> str:
        """Name of the numerics; answers are the same bits only for the same name."""
        return self._engine.ready.numerics

    @property
    def memory_plan(self) -> dict[str, int]:
        """Bytes of the engine's process by purpose, `total` included, as stated before it started."""
        return dict(self._engine.ready.memory)

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        return self._engine.ready.max_context

    @property
    def is_up(self) -> bool:
        """Whether the engine's process can take requests now; it cannot while it is started again after a crash."""
        return self._client is not None and self._client.is_up

    @property
    def is_starting(self) -> bool:
        """Whether the engine's process is started again after a crash."""
        return self._client is not None and self._client.is_starting

    @property
    def num_restarts(self) -> int:
        """How often the engine's process was started again after a crash."""
        return 0 if self._client is None else self._client.num_restarts

    def submit(
        self, prompt_ids: np.ndarray, params: SamplingParams, tell: Tell, *, images: tuple[PlacedImage, ...] = ()
    ) -> str:
        """Hand one request over without waiting for its answer; return its id for `cancel`.

        Waits while the engine's process is started again.

        Args:
            prompt_ids: [N] int64, from `encode` or `place`.
            params: how to sample.
            images: from `place`.
            tell: hears the request's events in order, from another thread: `PrefillEvent`s, `TokenEvent`s, and an
                error, if there is one, last.

        Raises:
            UserError: a parameter is refused.
            EngineError: the engine was closed or given up.
        """
        request = self._submission(prompt_ids, images, params)
        self._engine.submit(request, tell)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        """End a request at the next step boundary, if it has not ended yet."""
        self._engine.cancel(request_id)

    def ask(self, what: Question, tell: Callable[[Any], object]) -> None:
        """Ask as `status`, `traces`, `audit` and `clear_cache` do, without waiting: `tell` hears it, or an error.

        Raises:
            EngineError: the engine was closed or given up.
        """
        self._engine.ask(what, tell)

    def status(self) -> dict[str, int]:
        """Return counts of blocks, requests and bytes of the running engine."""
        return dict(self._engine.query("status"))

    def traces(self) -> "list[StepTrace]":
        """Return what the newest steps did, oldest first."""
        return list(self._engine.query("traces"))

    def audit(self) -> None:
        """Check the engine's books against its pools.

        Raises:
            HeadraceError: a block or slot is not as the books say.
        """
        problem = self._engine.query("audit")
        if problem is not None:
            raise HeadraceError(problem)

    def clear_cache(self, *, disk: bool = False) -> None:
        """Forget every cached prompt in memory; with `disk` also those that this model has in `cache_dir`.

        Raises:
            EngineError: the directory cannot be written, or another process has it for long.
        """
        if not self._engine.query("clear disk" if disk else "clear"):
            where = self.options.cache_dir
            raise EngineError(f"what is cached in {where} could not be forgotten; a writable directory is accepted")

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt's token ids, [N] int64; text begins with the begin token, images get theirs.

        Raises:
            UserError: the prompt is empty, has ids outside the vocabulary, or is text without a tokenizer.
            CapacityError: it is longer than the context.
        """
        return self.place(prompt)[0]

    def place(self, prompt: Prompt) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
        """Return what `encode` does, and the prompt's images, for `submit`.

        Raises:
            UserError: as `encode`; the model takes no images, or one cannot be read.
            CapacityError: the prompt is longer than the context.
        """
        config = self.config
        images: tuple[PlacedImage, ...] = ()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("the checkpoint has no tokenizer.json, so only token ids are accepted", param="prompt")
            ids = self.tokenizer.encode(prompt)
            if ids[:1] != [config.bos_token_id]:
                ids = [config.bos_token_id, *ids]
        elif isinstance(prompt, ImagePrompt):
            check_ids(prompt.token_ids, config.vocab_size)
            ids, images = place_images(prompt, config)
        else:
            ids = check_ids(prompt, config.vocab_size)
        if not ids:
            raise UserError("the prompt is empty; at least one token is needed", param="prompt")
        limit = self._engine.ready.max_context
        if len(ids) > limit:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens; the model's context is {limit} tokens", param="prompt"
            )
        return np.asarray(ids, dtype=np.int64), images

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answer one or many prompts; returns one result each, in order.

        Args:
            prompts: text or a list of token ids, or a list of those.
            params: one for all, or one each; greedy by default.

        Raises:
            UserError: a prompt or parameter is refused.
            EngineError: the engine's process ended meanwhile; it is started again for later calls.
        """
        results: dict[int, dict[int, Result]] = {}
        for piece in self.stream(prompts, params):
            if piece.result is not None:
                results.setdefault(piece.index, {})[piece.choice] = piece.result
        return [_joined(results[index]) for index in sorted(results)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_prefill: Callable[[int], object] | None = None,
    ) -> Iterator[Piece]:
        """Answer prompts and yield text as it becomes certain. Closing the iterator cancels what still runs.

        Args:
            prompts: as in `generate`.
            params: as in `generate`.
            on_prefill: called with the number of prompt tokens read since its last call.

        Raises:
            UserError: a prompt or parameter is refused, before anything runs.
        """
        many = as_prompts(prompts)
        each = as_params(params, len(many))
        requests = [self._submission(*self.place(prompt), one) for prompt, one in zip(many, each, strict=True)]
        return self._run(requests, on_prefill)

    def _submission(self, ids: np.ndarray, images: tuple[PlacedImage, ...], params: SamplingParams) -> Submission:
        size = self.config.vocab_size if self.tokenizer is None else min(self.config.vocab_size, self.tokenizer.size)
        check_ids([token_id for token_id, _ in params.bias_pairs], size, "logit_bias")
        check_ids(list(params.stop_token_ids), size, "stop_token_ids")
        if params.structured is not None and self.tokenizer is None:
            raise UserError("the checkpoint has no tokenizer.json, so no structure can be asked for", "structured")
        seed = draw_seed() if params.seed is None else params.seed
        return Submission(
            request_id=uuid.uuid4().hex,
            prompt_ids=ids,
            params=params,
            seed=seed,
            submitted=time.monotonic(),
            images=images,
        )

    def _run(self, requests: list[Submission], on_prefill: Callable[[int], object] | None) -> Iterator[Piece]:
        told: SimpleQueue[tuple[int, TokenEvent | PrefillEvent | HeadraceError]] = SimpleQueue()
        client = self._engine
        left: dict[str, int] = {}
        read = dict.fromkeys(range(len(requests)), 0)
        try:
            for index, request in enumerate(requests):
                client.submit(request, lambda event, index=index: told.put((index, event)))  # type: ignore[misc]
                left[request.request_id] = request.params.n
            while left:
                index, event = told.get()
                if isinstance(event, HeadraceError):
                    left.pop(requests[index].request_id, None)
                    raise event
                if isinstance(event, PrefillEvent):
                    self._tell_prefill(on_prefill, read, index, event.tokens)
                    continue
                self._tell_prefill(on_prefill, read, index, len(requests[index].prompt_ids))
                if event.result is not None:
                    self._add(event.result)
                    left[event.request_id] -= 1
                    if not left[event.request_id]:
                        del left[event.request_id]
                yield Piece(
                    index=index, text=event.text, token_id=event.token_id, result=event.result, choice=event.choice
                )
        finally:
            for request_id in left:
                client.cancel(request_id)

    def _tell_prefill(
        self, on_prefill: Callable[[int], object] | None, read: dict[int, int], index: int, tokens: int
    ) -> None:
        if on_prefill is not None and tokens > read[index]:
            on_prefill(tokens - read[index])
            read[index] = tokens

    def _add(self, result: Result) -> None:
        with self._lock:
            self.timings.prefill_s += result.timings.prefill_s
            self.timings.decode_s += result.timings.decode_s
            self.timings.ttft_s = result.timings.ttft_s

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            raise UserError("this LLM was closed; a new one is needed")
        return self._client


def _options(options: dict[str, Any]) -> EngineOptions:
    known = EngineOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UserError(f"option {name!r} is unknown; accepted are {', '.join(known)}", param=name)
    return EngineOptions(**options)


def _joined(choices: dict[int, Result]) -> Result:
    first, *others = (choices[choice] for choice in sorted(choices))
    return replace(first, alternatives=tuple(others)) if others else first
