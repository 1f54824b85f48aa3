"""Drafts in the engine's step: who gets guesses before a plan is made, and what the drafter hears after it."""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.engine.core.draft_policy import DraftPolicy
from headrace.engine.core.sequence import Sequence
from headrace.engine.core.step_rows import Candidate
from headrace.engine.drafting.acceptance import Rule, rule_for
from headrace.engine.drafting.choice import Choice
from headrace.engine.drafting.drafter import Committed, Drafter, Wanted
from headrace.engine.drafting.proposal import Proposal

_MOST_SKIPS = 7


@dataclass
class Track:
    """What is kept of one sequence.

    Attributes:
        heard: committed tokens that the drafter has heard of.
        taps: (first position, [T, n * D]) of committed rows it has not heard of, the newest window of them.
        proposal: guesses behind the sequence's newest token, until a step has verified them.
        length: committed tokens when they were made.
    """

    heard: int = 0
    taps: list[tuple[int, Tensor]] = field(default_factory=list)
    proposal: Proposal | None = None
    length: int = 0

    def add(self, first: int, taps: Tensor, window: int) -> None:
        """Keep the taps of committed rows; those further back than a window are of no use."""
        if self.taps and first != self.taps[-1][0] + len(self.taps[-1][1]):
            self.taps.clear()  # the rows between were not run through the decoder
        self.taps.append((first, taps))
        end = first + len(taps)
        while self.taps[0][0] + len(self.taps[0][1]) <= end - window:
            del self.taps[0]

    def taps_to(self, length: int) -> Tensor | None:
        """Return the taps kept, [T, n * D]; None unless they end at position `length` - 1."""
        if not self.taps or self.taps[-1][0] + len(self.taps[-1][1]) != length:
            return None  # later rows ran in steps that gave none
        return torch.cat([part for _, part in self.taps])


class Drafting:
    """Owns one drafter and what it has to hear; sequences are known by the scheduler's names."""

    def __init__(self, drafter: Drafter, window: int, policy: DraftPolicy | None = None) -> None:
        self.drafter = drafter
        self.policy = policy or DraftPolicy(drafter.max_guesses, is_guarded=False)
        self.is_drafting = False  # in the step that is being made
        self.gain: float | None = None  # of drafting at this step's size of batch, as far as measured
        self._window = window
        self._tracks: dict[str, Track] = {}
        self._rooms: dict[str, int] = {}  # of the sequences that decode in the step that is being made
        self._is_near = True
        self._skips = 0  # steps to come that will not draft whatever happens
        self._plain: list[float] = []  # seconds of steps without drafts that the policy has not heard of

    def wants_taps(self, *, has_prefill: bool) -> bool:
        """Whether the step's forward pass has to give taps: not while nobody will draft before they are too old."""
        return self.drafter.wants_taps and (has_prefill or self._is_near)

    def propose(self, sequences: Iterable[Sequence]) -> dict[str, int]:
        """Make guesses for the sequences that decode, and return how many each of them has.

        A sequence that still has guesses nobody verified, because it had no row or was away, keeps them. Where drafting
        has to wait, some steps pass without a look at anything.
        """
        if self._skips:
            self._skips -= 1
            return {}
        self._settle()
        ready = [sequence for sequence in sequences if _can_draft(sequence)]
        self._rooms = {sequence.request_id: _room(sequence) for sequence in ready}
        self.is_drafting = self.policy.wants(self._rooms)
        self.gain = self.policy.gain(len(ready))
        self._is_near = self.policy.wait < min(self._window, max(self._rooms.values(), default=0))
        if not self.is_drafting:
            self._skips = min(_MOST_SKIPS, max(0, int(self.policy.wait) - 1)) if ready else 0
            return {}
        open_ones = [sequence for sequence in ready if self._proposal_of(sequence) is None]
        self._tell(open_ones)
        wanted = [_wanted(sequence, self.drafter.max_guesses) for sequence in open_ones]
        if wanted:
            for sequence, proposal in zip(open_ones, self.drafter.propose(wanted), strict=True):
                track = self._tracks[sequence.request_id]
                track.proposal, track.length = self.policy.judge(proposal), sequence.num_committed
        proposals = [self._proposal_of(sequence) or Proposal(self.drafter.name) for sequence in ready]
        lengths = self.policy.lengths(proposals)
        return {sequence.request_id: length for sequence, length in zip(ready, lengths, strict=True)}

    def take(self, sequence: Sequence, count: int) -> Proposal:
        """Hand over a sequence's first `count` guesses, which are verified now."""
        proposal = self._proposal_of(sequence)
        track = self._tracks.get(sequence.request_id)
        if track is not None:
            track.proposal = None
        return Proposal(self.drafter.name) if proposal is None else proposal.cut(count)

    def note(self, sequence: Sequence, first: int, taps: Tensor | None) -> None:
        """Keep the taps [T, n * D] of rows that were committed, from position `first` on."""
        if taps is not None and len(taps):
            self._tracks.setdefault(sequence.request_id, Track()).add(first, taps, self._window)

    def note_step(self, found: Sequences[Candidate], *, has_prefill: bool, seconds: float) -> None:
        """Take what a step brought: how many guesses stayed, tokens, and how fast it was if it read no prompt."""
        if not self.is_drafting and not has_prefill:
            self._plain.append(seconds)
            return
        self._settle()
        decoded = [one for one in found if one.taken]
        if self.is_drafting:
            for one in decoded:
                self.policy.note_round(one.proposal, one.accepted)
        names = self._rooms
        going = {one.sequence.request_id: one.taken for one in decoded if one.sequence.request_id in names}
        self.policy.note_step(going, is_drafted=self.is_drafting, seconds=None if has_prefill else seconds)

    def _settle(self) -> None:
        """Tell the policy of the steps without drafts since it last heard, and look again at the next step."""
        if self._plain:
            self.policy.note_plain(self._rooms, self._plain)
            self._plain.clear()
        self._skips = 0

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let another answer begin with what is kept of the first."""
        self._settle()
        track = self._tracks.get(parent.request_id)
        if track is not None:
            self._tracks[child.request_id] = Track(taps=list(track.taps))

    def forget(self, request_id: str) -> None:
        """Let go of a sequence."""
        self._settle()
        self._rooms.pop(request_id, None)
        self._tracks.pop(request_id, None)
        self.drafter.forget([request_id])
        self.policy.forget(request_id)

    def _proposal_of(self, sequence: Sequence) -> Proposal | None:
        track = self._tracks.get(sequence.request_id)
        if track is None or track.proposal is None or track.length != sequence.num_committed:
            return None
        return track.proposal

    def _tell(self, sequences: list[Sequence]) -> None:
        """Let the drafter hear what was committed since it last heard."""
        told = []
        for sequence in sequences:
            track = self._tracks.setdefault(sequence.request_id, Track())
            told.append(
                Committed(
                    name=sequence.request_id,
                    first=track.heard,
                    token_ids=_tokens(sequence, track.heard),
                    taps=track.taps_to(sequence.num_committed),
                    state=sequence.state,
                )
            )
            track.heard = sequence.num_committed
            track.taps.clear()
        if told:
            self.drafter.observe(told)


def _can_draft(sequence: Sequence) -> bool:
    state = sequence.state
    has_begun = bool(sequence.answer.token_ids) and not sequence.is_over
    return has_begun and state is not None and state.length == sequence.num_committed


def _room(sequence: Sequence) -> int:
    """Return how many tokens an answer may still become longer by."""
    return max(0, sequence.answer.params.max_tokens - len(sequence.answer.token_ids))


def _tokens(sequence: Sequence, first: int) -> np.ndarray:
    """Return the committed tokens from position `first` on."""
    prompt, answer = sequence.submission.prompt_ids, sequence.answer.token_ids[:-1]
    start = max(0, first - len(prompt))
    return np.concatenate([prompt[first:], np.array(answer[start:], dtype=np.int64)])


def _wanted(sequence: Sequence, count: int) -> Wanted:
    return Wanted(
        name=sequence.request_id,
        token_id=sequence.answer.token_ids[-1],
        count=count,
        choice=Choice(sequence.answer.sampler, is_drawn=rule_for(sequence.answer.params) is not Rule.KEYED),
        state=sequence.state,
    )
