"""DSpark draft module of the cached path: context rings fed by taps, one parallel block, a sequential head."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import InternalError
from headrace.kernels.native.choice import OPERATIONS
from headrace.kernels.native.threads import kernel_threads
from headrace.kernels.rope import rotation
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.draft_operations import choose_draft_operations
from headrace.models.deepseek_v41.parameters import Parameters


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


@dataclass(frozen=True)
class Block:
    """What the parallel part gives of one sequence: the token it follows, hidden states [X, D], logits [X, V]."""

    token_id: int
    hidden_XD: Tensor
    logits_XV: Tensor


class Drafter:
    """Proposes tokens from the target's taps. Holds weights; context entries live in the sequence's draft rings."""

    def __init__(self, config: Config, parameters: Parameters, frequencies: Tensor) -> None:
        if config.draft is None or parameters.draft is None:
            raise InternalError("a drafter was built for a model without a draft module")
        self._config = config
        self._draft = config.draft
        self._embed = parameters.embed
        self._markov_embed = parameters.draft.markov_embed
        self._frequencies = frequencies
        self._operations = choose_draft_operations(config, parameters)
        self._is_whole = len(parameters.choice.native) == len(OPERATIONS)

    def _threads(self) -> AbstractContextManager[None]:
        return kernel_threads(self._operations.library, is_whole=self._is_whole)

    @torch.inference_mode()
    def observe(self, state: SequenceState, first: int, taps: Tensor) -> None:
        """Store the context entries of committed target positions.

        Args:
            state: the sequence; its draft rings are written.
            first: position of the first row.
            taps: [T, n * D] bfloat16, as `Output.taps`.

        Source: spec section 3.11, context KV.
        """
        positions = torch.arange(first, first + taps.shape[0], device=taps.device)
        with self._threads():
            self._operations.observe(state, first, taps, rotation(positions, self._frequencies))

    @torch.inference_mode()
    def propose(self, state: SequenceState, token_id: int) -> Proposal:
        """Draft greedily after the newest observed position, whose sampled next token is `token_id`."""
        found = list(self.guesses(state, token_id, lambda logits_V: int(logits_V.argmax())))
        confidence = torch.tensor([guess.confidence for guess in found], dtype=torch.float32)
        ids = torch.tensor([guess.token_id for guess in found])
        return Proposal(ids, torch.stack([guess.logits_V for guess in found]), confidence)

    def guesses(self, state: SequenceState, token_id: int, pick: Callable[[Tensor], int | None]) -> Iterator[Guess]:
        """Draft after the newest observed position, one guess after the other.

        Args:
            state: the sequence; nothing in it changes.
            token_id: the token that was sampled at the newest observed position.
            pick: chooses a token from float32 logits [V]; None ends the draft.
        """
        return self.guesses_of(self.blocks([(state, token_id)])[0], pick)

    @torch.inference_mode()
    def blocks(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[Block]:
        """Run the parallel part after the newest observed position of several sequences.

        Args:
            wanted: sequences, at least one, each with the token that was sampled at its newest observed position;
                nothing in them changes.

        Numerics: a block's bits do not depend on the others.
        """
        size, operations = self._draft.block_size, self._operations
        states = tuple(state for state, _ in wanted)
        device = self._embed.device
        ids = torch.full((len(wanted), size), self._draft.noise_token_id, device=device)
        ids[:, 0] = torch.tensor([token_id for _, token_id in wanted], device=device)
        ends = torch.tensor([state.draft_rings[0].end for state in states], device=device)
        positions = (ends.unsqueeze(1) + torch.arange(size, device=device)).flatten()
        turn = rotation(positions, self._frequencies)
        streams = self._config.num_streams
        x = self._embed[ids.flatten()].unsqueeze(1).expand(-1, streams, -1).contiguous()
        pre = torch.zeros((len(positions), streams), device=device)
        pre[:, 0] = 1.0
        with self._threads():
            for layer in operations.layers:
                attn = layer.open_attn(x, pre)
                x, ffn = layer.follow(layer.attend(attn.u_TD, turn, states), x, attn)
                x, pre = layer.expand(layer.experts(ffn.u_TD, None), x, ffn), ffn.pre_TM
            logits, hidden = operations.logits(x, pre)
        parts = zip(wanted, hidden.split(size), logits.split(size), strict=True)
        return [Block(token_id, hidden_XD, logits_XV) for (_, token_id), hidden_XD, logits_XV in parts]

    def guesses_of(self, block: Block, pick: Callable[[Tensor], int | None]) -> Iterator[Guess]:
        """Go through the places of a block, one guess after the other; `pick` is as in `guesses`."""
        previous = block.token_id
        for place in range(block.hidden_XD.shape[0]):
            guess = self._guess(block, place, previous, pick)
            if guess is None:
                return
            previous = guess.token_id
            yield guess

    @torch.inference_mode()
    def _guess(self, block: Block, place: int, previous: int, pick: Callable[[Tensor], int | None]) -> Guess | None:
        """Turn one place into a token, given the token before."""
        rows = slice(place, place + 1)
        embedded = self._markov_embed[previous : previous + 1]
        with self._threads():
            logits, confidence = self._operations.chain(block.hidden_XD[rows], block.logits_XV[rows], embedded)
        token_id = pick(logits[0])
        return None if token_id is None else Guess(token_id, float(confidence), logits[0])
