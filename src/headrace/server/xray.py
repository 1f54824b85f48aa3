"""X-rays of answers: what each step did, kept as JSON for the page while and after an answer runs.

The one place that turns the engine's events into the JSON of `/v1/xray/{response_id}`. Everything here runs on the
server's event loop; nothing is shared between threads.
"""

import asyncio
import json
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.engine.core.events import PrefillEvent, TokenEvent
from headrace.engine.result import Result
from headrace.models.deepseek_v41.architecture import Config
from headrace.models.deepseek_v41.inspect import report
from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.core.step_xray import Reads, StepXray

MAX_ANSWERS = 32
MAX_BYTES = 32 << 20
_COMPARED_HEADS = 8  # what models with grouped queries usually keep
_BF16_BYTES = 2


class Xray:
    """Events of one answer, oldest first, as (event name, JSON). Owned by an `XrayStore`.

    Attributes:
        salt: the request's cache salt, which tells whose it is.
        num_bytes: what it takes of the store's budget.
        is_over: nothing more comes.
    """

    def __init__(self, store: "XrayStore", prompt_ids: Sequence[int], salt: str | None) -> None:
        self._store = store
        self.salt = salt
        self._prompt_ids = array("q", prompt_ids)
        self._start: asyncio.Future[str] | None = None
        self._events: list[tuple[str, str]] = []
        self._num_tokens = 0
        self._waiting: set[asyncio.Event] = set()
        self.num_bytes = self._prompt_ids.itemsize * len(prompt_ids)
        self.is_over = False

    def add(self, event: TokenEvent | PrefillEvent) -> None:
        """Take an event of the engine; answers beside the first of a request are left out."""
        if isinstance(event, PrefillEvent):
            if event.xray is not None:
                self._put("prefill", prefill_json(event.xray))
            return
        if event.choice:
            return
        if event.token_id is not None:
            self._put("token", token_json(event, self._num_tokens, len(self._prompt_ids)))
            self._num_tokens += 1
        if event.result is not None:
            self._put("end", end_json(event.result))
            self.close()

    def close(self, reason: str = "cancelled") -> None:
        """End it, with a reason where no result came; does nothing the second time."""
        if self.is_over:
            return
        if not self._events or self._events[-1][0] != "end":
            self._put("end", {"finish_reason": reason, "usage": None, "work": None, "timings": None})
        self.is_over = True
        self._wake()

    async def follow(self) -> AsyncIterator[tuple[str, str]]:
        """Yield all events from the first on, waiting for those to come, until the answer is over.

        The first says what the model and the prompt are. It is made when somebody reads it, beside the event loop: a
        long prompt takes a while to be written token by token.
        """
        if self._start is None:
            self._start = asyncio.ensure_future(asyncio.to_thread(self._store.start_json, self._prompt_ids))
        yield "start", await asyncio.shield(self._start)
        next_one = 0
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            while True:
                news.clear()
                while next_one < len(self._events):
                    yield self._events[next_one]
                    next_one += 1
                if self.is_over:
                    return
                await news.wait()
        finally:
            self._waiting.discard(news)

    def _put(self, name: str, data: dict[str, Any]) -> None:
        if self.is_over:
            return
        text = _to_json(data)
        self._events.append((name, text))
        self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
        self._store.shrink()
        self._wake()

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()


class XrayStore:
    """The newest X-rays by response id, within a number and a budget of bytes. One owner: the server's state."""

    def __init__(
        self,
        config: Config,
        model_name: str,
        tokenizer: Tokenizer | None,
        *,
        max_answers: int = MAX_ANSWERS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Start empty.

        Args:
            config: the model that answers.
            model_name: the name it is served under.
            tokenizer: writes a prompt's tokens as text, None if there is none.
            max_answers: X-rays kept; the oldest goes first.
            max_bytes: bytes of JSON kept, in total; the newest X-ray stays even if it alone is larger.
        """
        self._model = model_json(config, model_name)
        self._tokenizer = tokenizer
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Xray] = OrderedDict()

    def begin(self, response_id: str, prompt_ids: Iterable[int], salt: str | None = None) -> Xray:
        """Start the X-ray of an answer; one of the same id is replaced."""
        xray = Xray(self, [int(token_id) for token_id in prompt_ids], salt)
        self._kept.pop(response_id, None)
        self._kept[response_id] = xray
        self.shrink()
        return xray

    def start_json(self, prompt_ids: Sequence[int]) -> str:
        """Say what the model and a prompt are; the prompt token by token where there is a tokenizer."""
        pieces = None if self._tokenizer is None else token_texts(self._tokenizer, prompt_ids)
        return _to_json({"model": self._model, "prompt_tokens": len(prompt_ids), "prompt_pieces": pieces})

    def get(self, response_id: str) -> Xray | None:
        """Return an X-ray, None where there is none any more."""
        return self._kept.get(response_id)

    def shrink(self) -> None:
        """Forget the oldest X-rays until the rest fits; who follows one still gets its end."""
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_answers or sum(one.num_bytes for one in self._kept.values()) > self._max_bytes
        ):
            self._kept.popitem(last=False)


def _to_json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def model_json(config: Config, name: str) -> dict[str, Any]:
    """Return what the page must know about a model; the same numbers as `headrace inspect --json`."""
    facts = report(config)
    layers = [layer for layer in facts["layers"] if layer["half"] is not None]
    heads = min(_COMPARED_HEADS, config.num_heads)
    engram = config.engram
    rows = 0 if engram is None else len(engram.layer_ids) * engram.num_hashes * (engram.max_ngram - 1)
    return {
        "name": name,
        "num_layers": len(layers),
        "layers": facts["layers"],
        "window": config.window,
        "max_positions": config.max_positions,
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "window_bytes_per_sequence": facts["window_bytes_per_sequence"],
        "state_bytes_per_sequence": facts["state_bytes_per_sequence"],
        "gqa8_bytes_per_token": 2 * heads * config.head_dim * _BF16_BYTES * len(layers),
        "gqa8_heads": heads,
        "head_dim": config.head_dim,
        "ngram_rows_per_token": rows,
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the text of all, a character stands at its last token."""
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces


def prefill_json(xray: "StepXray") -> dict[str, Any]:
    """Return a step that read some of a prompt."""
    step = xray.request
    return {
        "step": xray.step,
        "seconds": round(xray.seconds, 6),
        "start": step.start,
        "stop": step.stop,
        "decoder_rows": step.decoder_rows,
        "replayed_rows": step.replayed_rows,
        "cached_tokens": step.cached_tokens,
        "cached_blocks": step.cached_blocks,
        "cache_reason": step.cache_reason,
        "counts": asdict(step.counts),
    }


def token_json(event: TokenEvent, index: int, num_prompt: int) -> dict[str, Any]:
    """Return a token of the answer with the step that brought it; `reads` has the index sources only."""
    found: dict[str, Any] = {"index": index, "token_id": event.token_id, "text": event.text}
    found["position"] = num_prompt + index
    if event.xray is None:
        return found
    step = event.xray.request
    return found | {
        "step": event.xray.step,
        "seconds": round(event.xray.seconds, 6),
        "kind": step.kind,
        "counts": asdict(step.counts),
        "drafts_proposed": step.drafts_proposed,
        "drafts_made": step.drafts_made,
        "draft_chances": [round(chance, 4) for chance in step.draft_chances],
        "draft_gain": None if event.xray.draft_gain is None else round(event.xray.draft_gain, 3),
        "is_draft": event.is_draft,
        "reads": {str(layer_id): _reads_json(reads) for layer_id, reads in event.xray.reads.items()},
    }


def _reads_json(reads: "Reads") -> dict[str, Any]:
    return {"window": list(reads.window), "entries": [list(span) for span in reads.entries]}


def end_json(result: Result) -> dict[str, Any]:
    """Return the end of an answer."""
    return {
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "work": asdict(result.work),
        "timings": asdict(result.timings),
        "seed": result.seed,
        "cache_reason": result.cache_reason,
        "is_approximate": result.is_approximate,
        "numerics": result.numerics,
    }
