"""DSpark draft module of the cached path: context rings fed by taps, one parallel block, a sequential head."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import InternalError
from headrace.kernels.block_quant import fake_q8
from headrace.kernels.product import linear, linear_fp32
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rope import rotation
from headrace.kernels.sparse_attention import attend_block
from headrace.kernels.stream_mix import collapse
from headrace.models.deepseek_v41.attention import SERVED, Turn, project, project_output, window_entries
from headrace.models.deepseek_v41.block import finish_layer, half_input, half_mixes, live_router
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import LayerWeights, Parameters


@dataclass(frozen=True)
class Proposal:
    """A drafted block: `ids` [X], `logits` [X, V] float32, `confidence` [X] float32 raw logits (sigmoid: accept)."""

    ids: Tensor
    logits: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Guess:
    """One drafted token, the raw logit of its confidence, and its float32 logits [V]."""

    token_id: int
    confidence: float
    logits_V: Tensor


class Drafter:
    """Proposes tokens from the target's taps. Holds weights; context entries live in the sequence's draft rings."""

    def __init__(self, config: Config, parameters: Parameters, frequencies: Tensor) -> None:
        if config.draft is None or parameters.draft is None:
            raise InternalError("a drafter was built for a model without a draft module")
        self._config = config
        self._draft = config.draft
        self._parameters = parameters
        self._weights = parameters.draft
        self._frequencies = frequencies
        self._router = live_router(config.draft.experts_per_token, config)

    @torch.inference_mode()
    def observe(self, state: SequenceState, first: int, taps: Tensor) -> None:
        """Store the context entries of committed target positions.

        Args:
            state: the sequence; its draft rings are written.
            first: position of the first row.
            taps: [T, n * D] bfloat16, as `Output.taps`.

        Source: spec section 3.11, context KV.
        """
        main = linear(fake_q8(taps), self._weights.main_proj)
        main8 = fake_q8(rms_norm(main, self._weights.main_norm, self._config.norm_eps))
        positions = torch.arange(first, first + taps.shape[0], device=taps.device)
        turn = rotation(positions, self._frequencies)
        for ring, layer in zip(state.draft_rings, self._weights.layers, strict=True):
            kv = linear(main8, layer.attention.q_a_kv[self._config.q_lora_rank :])
            ring.store(first, window_entries(kv, layer.attention, turn, self._config.norm_eps, SERVED))

    @torch.inference_mode()
    def propose(self, state: SequenceState, token_id: int) -> Proposal:
        """Draft greedily after the newest observed position, whose sampled next token is `token_id`."""
        found = list(self.guesses(state, token_id, lambda logits_V: int(logits_V.argmax())))
        confidence = torch.tensor([guess.confidence for guess in found], dtype=torch.float32)
        ids = torch.tensor([guess.token_id for guess in found])
        return Proposal(ids, torch.stack([guess.logits_V for guess in found]), confidence)

    def guesses(self, state: SequenceState, token_id: int, pick: Callable[[Tensor], int | None]) -> Iterator["Guess"]:
        """Draft after the newest observed position, one guess after the other.

        Args:
            state: the sequence; nothing in it changes.
            token_id: the token that was sampled at the newest observed position.
            pick: chooses a token from float32 logits [V]; None ends the draft.
        """
        with torch.inference_mode():
            hidden_XD = self._hidden(state, token_id)
            base = linear_fp32(
                rms_norm(hidden_XD, self._weights.norm, self._config.norm_eps),
                self._parameters.head,
                self._config.vocab_size,
            )
            previous = token_id
            for place in range(hidden_XD.shape[0]):
                guess = self._guess(hidden_XD[place : place + 1], base[place : place + 1], previous, pick)
                if guess is None:
                    return
                previous = guess.token_id
                yield guess

    def _hidden(self, state: SequenceState, token_id: int) -> Tensor:
        """Return the block's hidden states [X, D] before the final norm."""
        config, draft = self._config, self._draft
        newest = state.draft_rings[0].end - 1
        device = self._parameters.embed.device
        ids = torch.full((draft.block_size,), draft.noise_token_id, device=device)
        ids[0] = token_id
        x = self._parameters.embed[ids].unsqueeze(1).expand(-1, config.num_streams, -1).contiguous()
        pre = torch.zeros((draft.block_size, config.num_streams), device=device)
        pre[:, 0] = 1.0
        positions = torch.arange(newest + 1, newest + 1 + draft.block_size, device=device)
        turn = rotation(positions, self._frequencies)
        for stage, layer in enumerate(self._weights.layers):
            ring = state.draft_rings[stage]
            context = ring.read(max(ring.oldest, newest - config.window + 1), newest + 1)
            x, pre = self._block(layer, x, pre, context, turn)
        return collapse(x, pre)

    def _block(self, layer: LayerWeights, x: Tensor, pre: Tensor, context: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        config = self._config
        attn_mix = half_mixes(x, layer.attn_mix, config)
        u = half_input(x, pre, layer.attn_norm, config)
        projected = project(fake_q8(u), layer.attention, turn, config)
        entries = torch.cat([context, projected.window_TH])
        value = attend_block(projected.q_TQH, entries, layer.attention.sink, scale=config.head_dim**-0.5)
        out = project_output(value, layer.attention, turn, config)
        done = finish_layer(layer, x, attn_mix, out, None, router=self._router, config=config)
        return done.x_TMD, done.pre_TM

    def _guess(
        self, hidden_1D: Tensor, base_1V: Tensor, previous: int, pick: Callable[[Tensor], int | None]
    ) -> "Guess | None":
        """Turn one hidden state into a token, given the token before.

        Source: spec section 3.11, steps 3 to 5; confidence reads the hidden state before the norm.
        """
        weights = self._weights
        embedded = weights.markov_embed[previous : previous + 1]
        row = base_1V + linear_fp32(embedded, weights.markov_head, self._config.vocab_size)
        token_id = pick(row[0])
        if token_id is None:
            return None
        confidence = linear_fp32(torch.cat([hidden_1D, embedded], 1), weights.confidence, 1)
        return Guess(token_id, float(confidence), row[0])
