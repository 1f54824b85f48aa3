"""The cached path of DeepSeek-V4.1-Flash: spans of sequences in, logits out, state kept by the sequences.

Read `reference/model.py` first: it says the same without a cache. Here the encoder and the decoder's KV producer run
on all rows, and the decoder on the rows that each span asks for (all of them, or the tail of a replayed prompt).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.cache.state_shape import StateShape
from headrace.core.errors import CapacityError, UserError
from headrace.kernels.native.choice import OPERATIONS, choose, numerics_name
from headrace.kernels.native.library import load
from headrace.kernels.native.room import Rooms
from headrace.kernels.native.threads import kernel_threads
from headrace.memory.addressing import Addressing
from headrace.memory.row_store import RowStore
from headrace.models.deepseek_v41.attention import Frequencies
from headrace.models.deepseek_v41.batch import Output, Rows, Span, Work, flatten, keep_tails
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.native_attention import Shared
from headrace.models.deepseek_v41.ngram_rows import NgramMemory, NgramRows
from headrace.models.deepseek_v41.operations import choose_head, choose_operations
from headrace.models.deepseek_v41.parameters import LayerWeights, Parameters
from headrace.models.deepseek_v41.plan import build_plan
from headrace.models.deepseek_v41.probe import Probe
from headrace.models.deepseek_v41.selection import Published


@dataclass(frozen=True)
class Numerics:
    """Named numerics of a model.

    `is_fp32_index`: float32 index scores instead of the vendor's bfloat16 rounding.
    `kernels`: which operations native kernels do, as `kernels/native/choice.py` reads it.
    `dtype` is that of activations and dense weights: bfloat16 as trained, or float32 for study (the quantisers stay).
    """

    is_fp32_index: bool = False
    dtype: torch.dtype = torch.bfloat16
    kernels: str = "torch"

    @property
    def name(self) -> str:
        """Identity of the numerics; answers are the same bits only for the same name."""
        activations = "" if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch.")
        index = "fp32" if self.is_fp32_index else "bf16"
        return numerics_name(self.kernels, index=index, activations=activations)


@dataclass
class _Pass:
    """Values of one forward pass while it runs: the rows still alive and what belongs to them.

    `x_TMD` streams, `pre_TM` pending pre-mix, `ngrams` the rows of n-gram tables, `is_dead` [T] tokens
    without n-grams, `taps` one [T, D] bfloat16 per tapped layer so far.
    """

    rows: Rows
    x_TMD: Tensor
    pre_TM: Tensor
    ngrams: NgramRows
    is_dead: Tensor
    taps: list[Tensor]
    published: Published
    work: Work
    shared: Shared
    probe: Probe | None
    wants_taps: bool
    has_produced: bool = False

    def keep(self, rows: Rows, index: Tensor) -> None:
        """Go on with the rows at `index` only."""
        self.rows = rows
        self.x_TMD, self.pre_TM, self.is_dead = self.x_TMD[index], self.pre_TM[index], self.is_dead[index]
        self.ngrams.keep(index)
        self.taps = [tap[index] for tap in self.taps]


class DeepseekV41:
    """One loaded model. Owns its weights; sequences own their state; a forward pass owns everything else.

    Native operations of all layers write their outputs to buffers of the model, so it runs one pass at a time.
    """

    def __init__(
        self,
        config: Config,
        parameters: Parameters,
        addressing: Addressing | None,
        *,
        device: torch.device,
        numerics: Numerics,
        row_store: RowStore | None = None,
    ) -> None:
        self.config = config
        self.parameters = parameters
        self.addressing = addressing
        self.device = device
        self.numerics = numerics
        self.plan = build_plan(config)
        self.frequencies = Frequencies.build(config, device)
        choice = choose(numerics.kernels)
        self._kernels = load() if choice.native else None
        self._is_whole = len(choice.native) == len(OPERATIONS)
        self._head = choose_head(parameters, config, choice)
        self._rooms = Rooms()
        self._operations = [
            choose_operations(layer, config, self.frequencies, choice, self._rooms) for layer in parameters.layers
        ]
        tables = {layer.plan.id: layer.ngram.table for layer in parameters.layers if layer.ngram is not None}
        self.memory = None if addressing is None else NgramMemory(addressing, tables, row_store)
        self._taps = config.draft.tap_layers if config.draft else ()

    @property
    def state_shape(self) -> StateShape:
        """Sizes of a sequence's state, for pools."""
        config = self.config
        return StateShape(
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            window=config.window,
            num_layers=config.num_layers,
            num_draft_layers=config.num_draft_layers if self.parameters.draft else 0,
            decoder_start=config.cut,
            source_ratios={source: config.compress_ratios[source] for source in config.kv_sources},
            lookback=self.addressing.lookback if self.addressing else 0,
        )

    @property
    def ngram_bytes_per_token(self) -> int:
        """Bytes that a token reads from all n-gram tables together, as stored."""
        if self.memory is None:
            return 0
        tables = self.memory.tables.values()
        return sum(self.memory.addressing.columns * (table.head_dim + table.head_dim // 32) for table in tables)

    def new_state(self) -> SequenceState:
        """Return the state of a sequence without tokens, with buffers of its own."""
        return SequenceState(self.state_shape, self.device)

    @torch.inference_mode()
    def forward(
        self,
        spans: list[Span],
        *,
        work: Work | None = None,
        wants_all_logits: bool = False,
        logit_rows: Sequence[int] | None = None,
        wants_taps: bool = False,
        probe: Probe | None = None,
        is_tolerant: bool = False,
    ) -> Output:
        """Run one batch and move every sequence's state past its span.

        Args:
            spans: at least one; a sequence appears once; every span has at least one token.
            work: counters to add to.
            wants_all_logits: logits of every decoder row instead of each span's last (spans with decoder rows only).
            logit_rows: per span, how many of its last decoder rows logits are wanted for; None as said above.
            wants_taps: also return the draft taps of the decoder's rows.
            probe: sees and may replace tensors.
            is_tolerant: a damaged n-gram row is no error of the batch: the layers wait for their rows one by one, and
                what the spans in `Output.faults` gave, their states included, must be thrown away.

        Returns:
            An `Output`.

        Raises:
            UserError: a token id is outside the vocabulary; an n-gram row is damaged (table and row are named).
            CapacityError: a sequence would become longer than the model's context.

        Numerics: a row's result depends on its own sequence only: not on other spans, chunk borders or threads.
        State: appends to the sequences' states. The errors named above come before anything is computed and leave the
            states as they were; after any other they must be thrown away.
        """
        work = Work() if work is None else work
        self.check(spans)
        with kernel_threads(self._kernels, is_whole=self._is_whole):
            run = self._start(spans, work, probe, wants_taps=wants_taps, is_tolerant=is_tolerant)
            for layer in self.parameters.layers:
                if layer.ngram is not None:
                    self._inject(layer, run)
                if layer.plan.id == self.config.cut:
                    self._enter_decoder(layer, spans, run)
                if run.rows.count == 0:
                    break
                self._layer(layer, run)
            counts = [span.decoder_rows if wants_all_logits else min(1, span.decoder_rows) for span in spans]
            logits = self._logits(run, counts if logit_rows is None else logit_rows, spans)
        for place, span in enumerate(spans):
            span.state.commit(span.num_rows, run.ngrams.compressed[place] if self.memory else None)
        taps = torch.cat(run.taps, 1) if run.taps else None
        return Output(logits, taps, run.rows, run.ngrams.faults)

    def check_memory(self, span: Span) -> None:
        """Read the n-gram rows of a span's tokens, for their errors only.

        Raises:
            UserError: a row is damaged; the table and the row are named.
        """
        if self.memory is not None:
            self.memory.begin([span], is_tolerant=False)

    def check(self, spans: list[Span]) -> None:
        """Refuse token ids outside the vocabulary and sequences longer than the context.

        Raises:
            UserError: a token id is outside the vocabulary.
            CapacityError: a sequence would become longer than the model's context.
        """
        vocab_size, limit = self.config.vocab_size, self.config.max_positions
        for span in spans:
            ids = span.token_ids
            wrong = (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                index = int(wrong.argmax())
                raise UserError(
                    f"token id {ids[index]} at position {span.state.length + index} is not in the vocabulary; "
                    f"accepted are 0 to {vocab_size - 1}",
                    param="token_ids",
                )
            total = span.state.length + span.num_rows
            if total > limit:
                raise CapacityError(f"{total} tokens do not fit the model's context of {limit} tokens", param="prompt")

    def _start(
        self, spans: list[Span], work: Work, probe: Probe | None, *, wants_taps: bool, is_tolerant: bool
    ) -> _Pass:
        """Ask for the tokens' n-gram rows and embed them."""
        no_ngrams = NgramRows([], None, {})
        ngrams = no_ngrams if self.memory is None else self.memory.begin(spans, is_tolerant=is_tolerant)
        rows = flatten(spans, self.device)
        ids = torch.from_numpy(np.concatenate([span.token_ids for span in spans])).to(self.device)
        x = self.parameters.embed[ids]
        if rows.is_image is not None:
            x[rows.is_image] = torch.cat([span.images.rows_ND for span in spans if span.images is not None])
        x_TMD = x.unsqueeze(1).expand(-1, self.config.num_streams, -1).contiguous()
        pre_TM = torch.zeros((rows.count, self.config.num_streams), dtype=torch.float32, device=self.device)
        pre_TM[:, 0] = 1.0
        is_dead = rows.is_image if rows.is_image is not None else torch.zeros_like(ids, dtype=torch.bool)
        return _Pass(
            rows, x_TMD, pre_TM, ngrams, is_dead, [], Published(), work, Shared(self._rooms), probe, wants_taps
        )

    def _inject(self, layer: LayerWeights, run: _Pass) -> None:
        inject = self._operations[layer.plan.id].inject
        if inject is not None:
            run.x_TMD = inject(run.x_TMD, run.ngrams.take(layer.plan.id, self.parameters.embed), run.is_dead)

    def _enter_decoder(self, layer: LayerWeights, spans: list[Span], run: _Pass) -> None:
        """Produce the decoder's global KV for all rows, then go on with the rows the decoder has to run on."""
        for span in spans:
            if span.is_replay:
                span.state.start_decoder(span.state.length + span.num_rows - span.decoder_rows)
                run.work.replayed_rows += span.decoder_rows
        counts = [span.decoder_rows for span in spans]
        dropped = run.rows.count - sum(counts)
        if dropped == 0:
            return
        x_TMD, pre_TM = run.x_TMD, run.pre_TM
        if run.probe is not None:
            x_TMD, pre_TM = run.probe.producer_input(layer.plan.id, run.rows, x_TMD, pre_TM)
        operations = self._operations[layer.plan.id]
        operations.produce(run.rows, operations.attn_input(x_TMD, pre_TM))
        run.has_produced = True
        run.work.producer_rows += dropped
        run.keep(*keep_tails(run.rows, counts))

    def _layer(self, layer: LayerWeights, run: _Pass) -> None:
        """Run one layer over the rows alive."""
        config, layer_id, rows, probe = self.config, layer.plan.id, run.rows, run.probe
        if probe is not None:
            run.x_TMD, run.pre_TM = probe.layer_input(layer_id, rows, run.x_TMD, run.pre_TM)
        if run.wants_taps and layer_id in self._taps:
            run.taps.append(run.x_TMD.float().mean(1).to(run.x_TMD.dtype))
        operations = self._operations[layer_id]
        attn = operations.open_attn(run.x_TMD, run.pre_TM)
        if layer.plan.role == "full" and not (layer_id == config.cut and run.has_produced):
            operations.produce(rows, attn.u_TD)
        is_fp32 = self.numerics.is_fp32_index
        out_TD = operations.attend(rows, attn.u_TD, run.published, run.work, run.shared, is_fp32_index=is_fp32)
        x_TMD, ffn = operations.follow(out_TD, run.x_TMD, attn)
        ffn_out = operations.experts(ffn.u_TD, rows.is_image)
        run.x_TMD, run.pre_TM = operations.expand(ffn_out, x_TMD, ffn), ffn.pre_TM
        run.work.layer_rows += rows.count
        if probe is None:
            return
        for name, tensor in (
            ("attn_in", attn.u_TD),
            ("attn_out", out_TD),
            ("ffn_in", ffn.u_TD),
            ("ffn_out", ffn_out),
        ):
            probe.record(name, layer_id, rows, tensor)
        probe.record("x_out", layer_id, rows, run.x_TMD)
        if layer.indexer is not None:
            blocks = run.published.blocks if layer.plan.has_candidates else None
            probe.record_selection(layer_id, rows, run.published.picked, blocks)

    def _logits(self, run: _Pass, counts: Sequence[int], spans: list[Span]) -> Tensor:
        """Return float32 logits of the last `counts[i]` decoder rows of every span."""
        x, pre = run.x_TMD, run.pre_TM
        wanted = [count for count, span in zip(counts, spans, strict=True) if span.decoder_rows]
        if sum(wanted) < run.rows.count:
            _, index = keep_tails(run.rows, wanted)
            x, pre = x[index], pre[index]
        return self._head(x, pre)
