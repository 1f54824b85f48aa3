"""Runs a prompt through the cached path and records every tensor that `headrace trace` writes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.chunk_plan import plan_chunks
from headrace.core.errors import UserError
from headrace.models.deepseek_v41.batch import ImageRows, Mode, Output, Rows, Span, Work
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.model import DeepseekV41

_MISSING_POSITION = -1


@dataclass(frozen=True)
class PromptImages:
    """Image positions of a whole prompt: `is_image` [N] bool and their embeddings `rows` [n, D] bfloat16."""

    is_image: np.ndarray
    rows: Tensor

    def slice(self, low: int, high: int) -> ImageRows | None:
        """Return the part of positions `low` .. `high` - 1, None if no image position is there."""
        marks = self.is_image[low:high]
        if not marks.any():
            return None
        start = int(self.is_image[:low].sum())
        return ImageRows(marks, self.rows[start : start + int(marks.sum())])


class Recorder:
    """Probe that writes rows to their positions in whole-prompt tensors, and feeds given layer inputs.

    Rows that no layer ran on stay NaN in float tensors, -1 in picks and 0 in candidates.
    """

    def __init__(self, num_tokens: int, model: DeepseekV41, feed: Mapping[str, Tensor] | None, prefix: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._num_tokens = num_tokens
        self._model = model
        self._feed = feed
        self._prefix = prefix
        self._blocks: dict[int, Tensor] = {}

    def layer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Record the input, then replace it if a feed is given."""
        self.record("x_in", layer_id, rows, x_TMD)
        self.record("pre_in", layer_id, rows, pre_TM)
        return self._replaced(layer_id, rows, x_TMD, pre_TM)

    def producer_input(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the input if a feed is given, but for rows that are NaN there, as in the trace of a replay."""
        fed = self._replaced(layer_id, rows, x_TMD, pre_TM)
        return torch.where(fed[0].isnan(), x_TMD, fed[0]), torch.where(fed[1].isnan(), pre_TM, fed[1])

    def _replaced(self, layer_id: int, rows: Rows, x_TMD: Tensor, pre_TM: Tensor) -> tuple[Tensor, Tensor]:
        if self._feed is None:
            return x_TMD, pre_TM
        fed = [self._fed(f"layers.{layer_id}.{part}", rows) for part in ("x_in", "pre_in")]
        return fed[0].to(x_TMD.dtype), fed[1].to(pre_TM.dtype)

    def _fed(self, name: str, rows: Rows) -> Tensor:
        key = self._prefix + name
        if self._feed is None or key not in self._feed:
            raise UserError(f"the feed file has no tensor {key}", param="feed")
        tensor = self._feed[key]
        width = (
            (self._model.config.num_streams,)
            if name.endswith("pre_in")
            else (self._model.config.num_streams, self._model.config.hidden_size)
        )
        wanted = (1, self._num_tokens, *width)
        if tuple(tensor.shape) != wanted:
            raise UserError(f"feed tensor {key} has shape {list(tensor.shape)}, expected {list(wanted)}", param="feed")
        _check_floating(key, tensor)
        return tensor[0][rows.positions.cpu()].to(rows.positions.device)

    def record(self, name: str, layer_id: int, rows: Rows, tensor: Tensor) -> None:
        """Write the rows of one layer's tensor."""
        self.put(f"layers.{layer_id}.{name}", rows.positions, tensor, float("nan"))

    def put(self, key: str, positions: Tensor, tensor: Tensor, fill: float) -> None:
        """Write rows [T, ...] at their positions of a whole-prompt tensor that starts filled with `fill`."""
        if key not in self.tensors:
            shape = (1, self._num_tokens, *tensor.shape[1:])
            self.tensors[key] = torch.full(shape, fill, dtype=tensor.dtype)
        self.tensors[key][0, positions.cpu()] = tensor.cpu()

    def record_selection(self, layer_id: int, rows: Rows, picked: list[Tensor], blocks: list[Tensor] | None) -> None:
        """Write picks, and keep candidate blocks until the number of entries is known."""
        for place, segment in enumerate(rows.segments):
            positions = rows.positions[segment.rows]
            self.put(f"layers.{layer_id}.topk", positions, picked[place].int(), _MISSING_POSITION)
            if blocks is not None:
                self.put(f"layers.{layer_id}.candidate_blocks", positions, blocks[place], -2)

    def finish(self, state: SequenceState) -> None:
        """Cut picks to their final width, spell candidates out, and add what the stores hold."""
        for plan in self._model.plan:
            if plan.role == "full":
                store = state.stores[plan.id]
                self.tensors[f"layers.{plan.id}.compress_kv"] = store.entries(0, store.length).cpu().unsqueeze(0)
                self.tensors[f"layers.{plan.id}.index_k"] = store.index_keys(0, store.length).cpu().unsqueeze(0)
            key = f"layers.{plan.id}.topk"
            if key in self.tensors and plan.kv_source is not None:
                width = min(self._model.config.index_topk, state.stores[plan.kv_source].length)
                self.tensors[key] = self.tensors[key][:, :, :width].contiguous()
            blocks = self.tensors.pop(f"layers.{plan.id}.candidate_blocks", None)
            if blocks is not None:
                entries = state.stores[plan.id].length
                self.tensors[f"layers.{plan.id}.candidates"] = self._candidates(blocks[0], entries, plan.ratio)

    def _candidates(self, blocks_TB: Tensor, entries: int, ratio: int) -> Tensor:
        """Return [1, N, entries] uint8: 1 for every existing entry of a kept block.

        A row of -1 kept every block with a visible entry; a row of -2 was never computed.
        """
        size = self._model.config.candidate_block_size
        num_blocks = -(-entries // size)
        visible = torch.div(torch.arange(self._num_tokens) + 1, ratio, rounding_mode="floor").unsqueeze(1)
        every = torch.arange(num_blocks) * size < visible
        some = torch.zeros((self._num_tokens, num_blocks + 1), dtype=torch.bool)
        some.scatter_(1, torch.where(blocks_TB >= 0, blocks_TB, num_blocks), True)
        has_all = (blocks_TB == -1).all(1, keepdim=True)
        kept = torch.where(has_all, every, some[:, :num_blocks])
        return kept.repeat_interleave(size, 1)[:, :entries].to(torch.uint8).contiguous().unsqueeze(0)


@dataclass(frozen=True)
class TraceOptions:
    """How to run a traced prompt; see contracts `headrace trace`. `chunk` and `split` None mean one piece."""

    mode: Mode = "replay"
    chunk: int | None = None
    split: int | None = None
    prefix: str = ""
    has_draft: bool = False
    draft_start: int | None = None


def trace(
    model: DeepseekV41,
    token_ids: np.ndarray,
    options: TraceOptions,
    *,
    feed: Mapping[str, Tensor] | None = None,
    images: PromptImages | None = None,
    work: Work | None = None,
) -> dict[str, Tensor]:
    """Run a prompt and return every traced tensor on the CPU.

    Args:
        model: the loaded model.
        token_ids: [N] int64.
        options: mode, chunks, split, feed prefix, drafts.
        feed: tensors `{prefix}layers.{i}.x_in` and `.pre_in` that replace layer inputs.
        images: image positions of the prompt.
        work: counters to add to.

    Raises:
        UserError: the options do not fit each other or the feed lacks a tensor.
    """
    num_tokens = len(token_ids)
    state = model.new_state()
    model.check([Span(state, token_ids, decoder_rows=0)])  # all of it, before the first chunk is computed
    if options.has_draft:
        _check_draft(model, num_tokens, options, feed)
    state.reserve(num_tokens)
    recorder = Recorder(num_tokens, model, feed, options.prefix)
    for span in _spans(model, state, token_ids, options, images):
        output = model.forward([span], work=work, wants_all_logits=True, wants_taps=True, probe=recorder)
        _record_output(recorder, output)
    tensors = recorder.tensors
    recorder.finish(state)
    tensors["input_ids"] = torch.from_numpy(token_ids).unsqueeze(0)
    tensors["embeds"] = _embeds(model, token_ids, images)
    if model.addressing is not None:
        ids = model.addressing.compress(token_ids, images.is_image if images else None)
        rows = model.addressing.row_ids(model.addressing.history(ids, model.addressing.fresh()))
        tensors["engram_hash_ids"] = torch.from_numpy(rows).unsqueeze(0)
    if options.has_draft:
        tensors.update(_drafts(model, tensors, options, feed))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _record_output(recorder: Recorder, output: Output) -> None:
    if output.decoder.count == 0:
        return
    recorder.put("logits_all", output.decoder.positions, output.logits, float("nan"))
    if output.taps is not None:
        recorder.put("main_hidden", output.decoder.positions, output.taps, float("nan"))


def _spans(
    model: DeepseekV41, state: SequenceState, token_ids: np.ndarray, options: TraceOptions, images: PromptImages | None
) -> Iterator[Span]:
    """Yield the span of every forward pass of the plan."""
    num_tokens, window = len(token_ids), model.config.window
    prompt = num_tokens if options.split is None else options.split
    if options.split is not None and options.mode != "full":
        raise UserError("--split compares a prefill with decode and is accepted in full mode only", param="split")
    if not 1 <= prompt <= num_tokens:
        raise UserError(f"a split after {prompt} tokens is not possible; accepted is 1 to {num_tokens}", param="split")
    is_replay = options.mode == "replay"
    sizes = plan_chunks(prompt, options.chunk or prompt, window if is_replay else 1)
    sizes += [1] * (num_tokens - prompt)
    low = 0
    for place, size in enumerate(sizes):
        is_last = place == len(sizes) - 1
        decoder_rows = size if not is_replay else min(window, num_tokens) if is_last else 0
        part = images.slice(low, low + size) if images else None
        ids = token_ids[low : low + size]
        yield Span(state, ids, decoder_rows, is_replay=is_replay and is_last, images=part)
        low += size


def _embeds(model: DeepseekV41, token_ids: np.ndarray, images: PromptImages | None) -> Tensor:
    rows = model.parameters.embed[torch.from_numpy(token_ids).to(model.device)].cpu()
    if images is not None:
        rows[torch.from_numpy(images.is_image)] = images.rows.cpu()
    return rows.unsqueeze(0)


def _drafts(
    model: DeepseekV41, tensors: Mapping[str, Tensor], options: TraceOptions, feed: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Draft greedily after every position from a start on.

    With a feed the context is its `{prefix}main_hidden` and the known tokens are `decode_own.dspark_ids[:, :, 0]`,
    one per drafted position, the last position last. Without one, the known token is the arg max of the own logits.
    """
    taps, start, known = _draft_inputs(tensors, options, feed)
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    state = model.new_state()
    first_row = int((~taps.isnan().any(1)).int().argmax())
    state.start_decoder(first_row)
    taps = taps.to(model.device)
    drafter.observe(state, first_row, taps[first_row:start])
    ids, logits, confidence = [], [], []
    for step, token_id in enumerate(known):
        position = start + step
        drafter.observe(state, position, taps[position : position + 1])
        proposal = drafter.propose(state, token_id)
        ids.append(torch.cat([torch.tensor([token_id]), proposal.ids]))
        logits.append(proposal.logits)
        confidence.append(proposal.confidence)
    return {
        "draft.ids": torch.stack(ids).unsqueeze(0),
        "draft.logits": torch.stack(logits).cpu().unsqueeze(0),
        "draft.confidence": torch.stack(confidence).cpu().unsqueeze(0),
    }


def _check_draft(model: DeepseekV41, num_tokens: int, options: TraceOptions, feed: Mapping[str, Tensor] | None) -> None:
    """Refuse drafts that the model, the start or the feed do not allow."""
    config = model.config
    if config.draft is None or model.parameters.draft is None:
        raise UserError("--draft was asked for, but the model has no draft module", param="draft")
    if feed is None:
        start = options.draft_start or 0
        if start >= num_tokens:
            raise UserError(f"a draft start of {start} is past the last position {num_tokens - 1}", param="draft_start")
        return
    taps, known = (_fed_draft(feed, name) for name in _draft_names(options))
    wanted = [1, num_tokens, len(config.draft.tap_layers) * config.hidden_size]
    if list(taps.shape) != wanted:
        name = _draft_names(options)[0]
        raise UserError(f"feed tensor {name} has shape {list(taps.shape)}, expected {wanted}", param="feed")
    if known.dim() != 3 or not 1 <= known.shape[1] <= num_tokens:
        raise UserError(
            f"feed tensor {_draft_names(options)[1]} has shape {list(known.shape)}, expected [1, 1 to {num_tokens}, "
            f"{config.draft.block_size + 1}]",
            param="feed",
        )
    _check_floating(_draft_names(options)[0], taps)
    first_row = int((~taps[0].isnan().any(1)).int().argmax())
    if known.is_floating_point() or known.dtype == torch.bool:
        raise UserError(
            f"feed tensor {_draft_names(options)[1]} has dtype {known.dtype}, token ids are expected", "feed"
        )
    if not 0 <= int(known.min()) <= int(known.max()) < config.vocab_size:
        raise UserError(
            f"feed tensor {_draft_names(options)[1]} has a token id outside 0 to {config.vocab_size - 1}", param="feed"
        )
    if num_tokens - known.shape[1] < first_row:
        raise UserError(
            f"feed tensor {_draft_names(options)[1]} has {known.shape[1]} steps, but only "
            f"{num_tokens - first_row} rows of {_draft_names(options)[0]} hold numbers",
            param="feed",
        )


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise UserError(
            f"feed tensor {name} has dtype {tensor.dtype}, floating-point numbers are expected", param="feed"
        )


def _draft_names(options: TraceOptions) -> tuple[str, str]:
    return f"{options.prefix}main_hidden", "decode_own.dspark_ids"


def _fed_draft(feed: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in feed:
        raise UserError(f"the feed file has no tensor {name}, which --draft needs", param="feed")
    return feed[name]


def _draft_inputs(
    tensors: Mapping[str, Tensor], options: TraceOptions, feed: Mapping[str, Tensor] | None
) -> tuple[Tensor, int, list[int]]:
    """Return taps [N, n * D], the first position to draft after and the known next token of each."""
    num_tokens = tensors["input_ids"].shape[1]
    if feed is not None:
        taps, ids = (_fed_draft(feed, name) for name in _draft_names(options))
        known = ids[0, :, 0].tolist()
        return taps[0].to(tensors["main_hidden"].dtype), num_tokens - len(known), known
    computed = ~tensors["logits_all"][0].isnan().any(1)
    start = max(options.draft_start or 0, int(computed.int().argmax()))
    return tensors["main_hidden"][0], start, tensors["logits_all"][0, start:].argmax(-1).tolist()
