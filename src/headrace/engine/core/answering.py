"""From logits to tokens and events: sample, accept guesses, end what is over, fail what cannot go on."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError, HeadraceError, UserError
from headrace.engine.core.events import ErrorEvent, Event, TokenEvent
from headrace.engine.core.sequence import Sequence
from headrace.engine.core.step_rows import Candidate
from headrace.engine.core.totals import Totals
from headrace.engine.drafting.acceptance import Rule, accept, rule_for
from headrace.engine.result import Result
from headrace.engine.sampling.pipeline import RowError, sample_batch
from headrace.engine.scheduler.entry import EndReason
from headrace.engine.scheduler.scheduler import Scheduler


class Answering:
    """Moves answers on. The engine's core owns the sequences and the scheduler; this writes to both, and the totals."""

    def __init__(
        self, sequences: Mapping[str, Sequence], scheduler: Scheduler, totals: Totals, numerics_name: str
    ) -> None:
        self._sequences, self._scheduler, self._totals = sequences, scheduler, totals
        self._numerics_name = numerics_name

    def sample(self, found: list[Candidate]) -> list[Event]:
        """Give every candidate its next token, and one more for every guess that turns out to be that token.

        A row's logits stand for the text before it, so the logits behind a guess count only if the guess is what was
        sampled: the answer is the one without guesses, whoever made them.
        """
        events = self._sample(found)
        accepted = {(one.sequence.submission.request_id, one.sequence.choice): one.accepted for one in found}
        return [_with_accepted(event, accepted) for event in events]

    def _sample(self, found: list[Candidate]) -> list[Event]:
        events: list[Event] = []
        live = [one for one in found if len(one.logits_RV) and not one.sequence.is_over]
        for one in live:
            one.sequence.note_guesses(len(one.guesses))
        events += [event for one in live if _is_exact(one) for event in self._sample_exactly(one)]
        live = [one for one in live if not _is_exact(one)]
        while live:
            logits = torch.stack([one.logits_RV[one.taken] for one in live])
            try:
                tokens = sample_batch(logits, [one.sequence.answer.sampler for one in live])
            except RowError as error:
                cause = error.__cause__
                reason = cause if isinstance(cause, HeadraceError) else error
                events += self.fail(live.pop(error.row).sequence, reason)
                continue
            for one, token_id in zip(live, tokens, strict=True):
                is_guess = one.taken < len(one.guesses) and one.guesses[one.taken] == token_id
                one.accepted += is_guess
                one.sequence.drafts_accepted += is_guess
                events += self._take(one, token_id, one.logits_RV[one.taken], is_guess=is_guess)
                one.taken += 1
            live = [one for one in live if one.goes_on() and not one.sequence.is_over]
        return events

    def _sample_exactly(self, one: Candidate) -> list[Event]:
        """Judge a sequence's guesses by their own distribution and the model's."""
        sequence, proposal = one.sequence, one.proposal
        if proposal is None:
            return []
        try:
            found = accept(rule_for(sequence.answer.params), one.logits_RV, proposal, sequence.answer.sampler)
        except RowError as error:
            cause = error.__cause__
            return self.fail(sequence, cause if isinstance(cause, HeadraceError) else error)
        events: list[Event] = []
        for place, token_id in enumerate(found.token_ids):
            is_guess = place < found.num_guessed
            one.accepted += is_guess
            sequence.drafts_accepted += is_guess
            events += self._take(one, token_id, one.logits_RV[place], is_guess=is_guess)
            one.taken += 1
            if sequence.is_over:
                break
        return events

    def over(
        self, sequence: Sequence, token_id: int | None, text: str, *, is_guess: bool = False, back: int = 0
    ) -> list[Event]:
        """Tell an answer's end; its last token came from the row `back` rows before the step's last one."""
        sequence.is_over = True
        result = sequence.result(self._numerics_name)
        return [_event(sequence, token_id, text, result, is_guess=is_guess, back=back)]

    def fail(self, sequence: Sequence, error: HeadraceError) -> list[Event]:
        """End a request with all its answers."""
        name = sequence.submission.request_id
        is_told = False
        for one in [one for one in self._sequences.values() if one.submission.request_id == name]:
            is_told, one.is_over = is_told or (one.is_over and one.answer.finish_reason is None), True
            self._scheduler.finish(one.request_id, EndReason.ERROR)
        if is_told:
            return []
        self._totals.failed += not isinstance(error, UserError) or isinstance(error, CheckpointError)
        return [ErrorEvent(request_id=name, kind=type(error).__name__, message=error.message, param=error.param)]

    def _take(self, one: Candidate, token_id: int, logits_V: Tensor, *, is_guess: bool) -> list[Event]:
        sequence, answer, back = one.sequence, one.sequence.answer, len(one.guesses) - one.taken
        try:
            text = answer.take(token_id, logits_V)
        except UserError as error:
            return self.fail(sequence, error)
        self._totals.generated_tokens += 1
        sequence.last_token = time.monotonic()
        sequence.first_token = sequence.first_token or sequence.last_token
        if answer.finish_reason is None:
            return [_event(sequence, token_id, text, is_guess=is_guess, back=back)]
        self._scheduler.finish(sequence.request_id, EndReason.STOP)
        return self.over(sequence, token_id, text, is_guess=is_guess, back=back)


def _is_exact(one: Candidate) -> bool:
    """Whether an exact rule judges, under which the guesses decide which answer of several comes."""
    return bool(one.guesses) and rule_for(one.sequence.answer.params) is not Rule.KEYED


def _with_accepted(event: Event, accepted: Mapping[tuple[str, int], int]) -> Event:
    """Return an event whose X-ray says how many guesses stayed, which is known only when all rows were judged."""
    if not isinstance(event, TokenEvent) or event.xray is None:
        return event
    stayed = accepted.get((event.request_id, event.choice), 0)
    return replace(event, xray=replace(event.xray, request=replace(event.xray.request, drafts_accepted=stayed)))


def _event(
    sequence: Sequence,
    token_id: int | None,
    text: str,
    result: Result | None = None,
    *,
    is_guess: bool = False,
    back: int = 0,
) -> TokenEvent:
    is_token = token_id is not None
    logprob, alternatives = sequence.answer.newest_logprob if is_token else (None, ())
    return TokenEvent(
        request_id=sequence.submission.request_id,
        choice=sequence.choice,
        token_id=token_id,
        text=text,
        logprob=logprob,
        top_logprobs=alternatives,
        result=result,
        xray=sequence.xray.of_row(back) if is_token and sequence.xray is not None else None,
        is_draft=is_guess,
    )
