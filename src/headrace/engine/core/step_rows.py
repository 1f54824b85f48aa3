"""From a plan to one forward pass, and from its rows back to requests."""

import time
from collections.abc import Container, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import InternalError, UserError
from headrace.engine.core.account import Accountant, Run
from headrace.engine.core.sequence import Sequence
from headrace.engine.core.trace import RequestStep
from headrace.engine.core.xray import ReadsProbe, StepXray
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.sampling.logprobs import target_logprobs
from headrace.engine.scheduler.plan import StepPlan
from headrace.memory.row_counts import NgramReads
from headrace.models.deepseek_v41.batch import ImageRows, Output, Span
from headrace.models.deepseek_v41.model import DeepseekV41

_NO_GUESSES = Proposal("")


@dataclass
class StepRows:
    """The rows of one step.

    `spans` and `sequences` belong together; `steps` says what each does; `samples` names those whose last row gives a
    token, in the order of their spans; `proposals` are the guesses behind a decode row. `probe` saw the forward pass,
    where a request asked for that; `failed` are the sequences that read a damaged n-gram row in it, and `reads` what
    reading n-gram rows took. `draft_gain` is as in `StepTrace`.
    """

    spans: list[Span] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    steps: list[RequestStep] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    proposals: list[Proposal | None] = field(default_factory=list)
    probe: ReadsProbe | None = None
    failed: list[tuple[Sequence, UserError]] = field(default_factory=list)
    reads: NgramReads = field(default_factory=NgramReads)
    draft_gain: float | None = None
    _had_guesses: bool = False

    @property
    def has_prefill(self) -> bool:
        """Whether a prompt is read."""
        return any(step.kind == "prefill" for step in self.steps)

    @property
    def had_guesses(self) -> bool:
        """Whether guesses were dropped."""
        return self._had_guesses

    def drop_guesses(self, accountant: Accountant, only: int | None = None) -> None:
        """Leave every decode row, or only the one at a place, its newest token alone."""
        for place, proposal in enumerate(self.proposals):
            if not proposal or only not in {None, place}:
                continue
            self._had_guesses = True
            step, span = self.steps[place], self.spans[place]
            run = _run_of(self.sequences[place], span.state, step.start, step.start + 1, 1, is_replay=False)
            self.proposals[place] = None
            self.spans[place] = replace(span, token_ids=span.token_ids[:1], decoder_rows=1)
            self.steps[place] = replace(
                step,
                stop=step.start + 1,
                decoder_rows=1,
                drafts_proposed=0,
                draft_ids=(),
                draft_chances=(),
                counts=accountant.count(run),
            )

    def drop(self, request_ids: Container[str]) -> None:
        """Take the rows of some sequences out."""
        kept = [place for place, sequence in enumerate(self.sequences) if sequence.request_id not in request_ids]
        self.spans = [self.spans[place] for place in kept]
        self.steps = [self.steps[place] for place in kept]
        self.samples = [self.samples[place] for place in kept]
        self.proposals = [self.proposals[place] for place in kept]
        self.sequences = [self.sequences[place] for place in kept]


@dataclass
class Candidate:
    """What one sequence gets from a forward pass.

    Attributes:
        sequence: whose.
        place: its place in the step's rows.
        logits_RV: float32 logits to sample from: of its newest token and the guesses behind it; none inside a prompt.
        proposal: those guesses.
        taps: [T, n * D] of its decoder rows, if asked for.
        taken: tokens taken so far; `accepted` of them were guesses.
    """

    sequence: Sequence
    place: int
    logits_RV: Tensor
    proposal: Proposal | None = None
    taps: Tensor | None = None
    taken: int = 0
    accepted: int = 0

    @property
    def guesses(self) -> tuple[int, ...]:
        """The ids guessed."""
        return () if self.proposal is None else self.proposal.token_ids

    def goes_on(self) -> bool:
        """Whether the newest token taken is the one guessed, so that the next row's logits count too."""
        newest = self.taken - 1
        return newest < len(self.guesses) and self.sequence.answer.token_ids[-1] == self.guesses[newest]


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one sequence from position `start` on; the last `decoder_rows` run through the decoder."""

    token_ids: np.ndarray
    start: int
    decoder_rows: int
    images: ImageRows | None = None
    proposal: Proposal | None = None


def lay_out(
    plan: StepPlan,
    sequences: Mapping[str, Sequence],
    accountant: Accountant,
    model: DeepseekV41,
    proposals: Mapping[str, Proposal],
) -> StepRows:
    """Turn decode rows and prefill chunks into spans, decode rows first; `proposals` are the guesses to verify."""
    rows = StepRows()
    for row in plan.decodes:
        sequence = sequences[row.request_id]
        proposal = proposals.get(row.request_id)
        guesses = proposal.token_ids if proposal is not None else ()
        tokens = np.array([sequence.answer.token_ids[-1], *guesses], dtype=np.int64)
        verified = _Chunk(tokens, row.position, len(tokens), proposal=proposal)
        _add(rows, sequence, verified, accountant, kind="decode")
    for chunk in plan.prefills:
        sequence = sequences[chunk.request_id]
        token_ids = sequence.submission.prompt_ids[chunk.start : chunk.stop]
        size = chunk.stop - chunk.start
        tail = min(model.config.window, sequence.num_prompt) if chunk.is_last else 0
        decoder_rows = size if sequence.mode == "full" else tail
        images = None if sequence.images is None else sequence.images.part(model, chunk.start, chunk.stop)
        span = _Chunk(token_ids, chunk.start, decoder_rows, images)
        _add(rows, sequence, span, accountant, kind="prefill", is_last=chunk.is_last)
    return rows


def _add(
    rows: StepRows,
    sequence: Sequence,
    chunk: _Chunk,
    accountant: Accountant,
    *,
    kind: str,
    is_last: bool = True,
) -> None:
    state, start, decoder_rows = sequence.state, chunk.start, chunk.decoder_rows
    proposal = _NO_GUESSES if chunk.proposal is None else chunk.proposal
    if state is None or state.length != start:
        held = "no state" if state is None else f"{state.length} tokens"
        raise InternalError(f"request {sequence.request_id} was planned at {start} and has {held}")
    stop = start + len(chunk.token_ids)
    is_replay = kind == "prefill" and is_last and sequence.mode == "replay"
    rows.spans.append(Span(state, chunk.token_ids, decoder_rows, is_replay=is_replay, images=chunk.images))
    rows.sequences.append(sequence)
    rows.samples.append(is_last)
    rows.proposals.append(chunk.proposal)
    run = _run_of(sequence, state, start, stop, decoder_rows, is_replay=is_replay)
    rows.steps.append(
        RequestStep(
            request_id=sequence.request_id,
            kind=kind,
            start=start,
            stop=stop,
            decoder_rows=decoder_rows,
            replayed_rows=decoder_rows if is_replay else 0,
            counts=accountant.count(run),
            cached_tokens=sequence.cached_tokens if sequence.is_first_step else 0,
            cached_blocks=dict(sequence.cached_blocks) if sequence.is_first_step else {},
            cache_reason=sequence.cache_reason if sequence.is_first_step else None,
            drafts_proposed=len(proposal),
            drafts_made=proposal.num_made,
            draft_ids=proposal.token_ids,
            draft_chances=proposal.chances or (),
        )
    )


def _run_of(
    sequence: Sequence, state: SequenceState, start: int, stop: int, decoder_rows: int, *, is_replay: bool
) -> Run:
    return Run(
        start=start,
        stop=stop,
        decoder_rows=decoder_rows,
        encoder_floor=state.encoder_floor,
        decoder_floor=stop - decoder_rows if is_replay else state.decoder_floor,
        write_from=sequence.cached_tokens,
    )


def run(
    model: DeepseekV41, rows: StepRows, vocab_size: int, accountant: Accountant, *, wants_taps: bool = False
) -> list[Candidate]:
    """Run the model over the rows of a step; return what every sequence gets, in the order of their spans.

    Args:
        model: moves every state on.
        rows: see `lay_out`.
        vocab_size: ids from here on have no token; their logits are cut off.
        accountant: counts rows that run once more.
        wants_taps: also give the drafter's taps.

    State: adds prompt log-probabilities to the sequences that want them, and to `rows.failed` those whose n-gram rows
        are damaged; what they get is worthless.
    """
    watched = [span.state for span, sequence in zip(rows.spans, rows.sequences, strict=True) if sequence.wants_xray]
    rows.probe = ReadsProbe(model.plan, model.config.window, watched) if watched else None
    counts = [_logit_rows(sequence, step) for sequence, step in zip(rows.sequences, rows.steps, strict=True)]
    output = model.forward(rows.spans, logit_rows=counts, wants_taps=wants_taps, probe=rows.probe, is_tolerant=True)
    parts = _split(output, counts, [span.decoder_rows for span in rows.spans])
    for place, fault in output.faults.items():
        if rows.proposals[place]:  # it may be a guess that leads there, and a guess must not fail its request
            parts[place], again = _run_without_guesses(model, rows, place, accountant, wants_taps=wants_taps)
            rows.failed += [(rows.sequences[place], error) for error in again]
        else:
            rows.failed.append((rows.sequences[place], fault))
    found = []
    for place, sequence in enumerate(rows.sequences):
        step = rows.steps[place]
        mine, taps = parts[place]
        mine = mine[:, :vocab_size]
        if step.decoder_rows and _wants_prompt(sequence, step):
            _note_prompt(sequence, step, mine)
        verified = 1 + step.drafts_proposed
        found.append(
            Candidate(
                sequence=sequence,
                place=place,
                logits_RV=mine[len(mine) - verified :] if rows.samples[place] else mine[:0],
                proposal=rows.proposals[place],
                taps=taps,
            )
        )
    return found


def _split(output: Output, counts: Several[int], decoder_rows: Several[int]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the logits and the taps of each span."""
    logits = output.logits.split(list(counts))
    if output.taps is None:
        return [(mine, None) for mine in logits]
    return list(zip(logits, output.taps.split(list(decoder_rows)), strict=True))


def _run_without_guesses(
    model: DeepseekV41, rows: StepRows, place: int, accountant: Accountant, *, wants_taps: bool
) -> tuple[tuple[Tensor, Tensor | None], list[UserError]]:
    """Take one sequence's rows of this step back and run its newest token alone; also return that token's fault."""
    rows.spans[place].state.rollback(rows.steps[place].start)
    rows.drop_guesses(accountant, only=place)
    output = model.forward([rows.spans[place]], logit_rows=[1], wants_taps=wants_taps, is_tolerant=True)
    return _split(output, [1], [1])[0], list(output.faults.values())


def _logit_rows(sequence: Sequence, step: RequestStep) -> int:
    """Return how many of a span's last rows logits are needed for."""
    if _wants_prompt(sequence, step):
        return step.decoder_rows
    return min(step.decoder_rows, 1 + step.drafts_proposed)


def note_xrays(rows: StepRows, step: int, began: float) -> None:
    """Leave with every sequence that asked what this step did for it."""
    for place, sequence in enumerate(rows.sequences):
        if sequence.wants_xray and sequence.state is not None and rows.probe is not None:
            reads = rows.probe.reads_of(sequence.state)
            seconds = time.monotonic() - began
            sequence.xray = StepXray(
                step=step, seconds=seconds, request=rows.steps[place], reads=reads, draft_gain=rows.draft_gain
            )


def damaged(model: DeepseekV41, rows: StepRows) -> list[tuple[Sequence, UserError]]:
    """Return the sequences whose tokens lead to damaged n-gram rows, each with its error."""
    found: list[tuple[Sequence, UserError]] = []
    for sequence, span in zip(rows.sequences, rows.spans, strict=True):
        try:
            model.check_memory(span)
        except UserError as error:
            found.append((sequence, error))
    return found


def _wants_prompt(sequence: Sequence, step: RequestStep) -> bool:
    return step.kind == "prefill" and sequence.answer.params.num_prompt_alternatives is not None


def _note_prompt(sequence: Sequence, step: RequestStep, logits_TV: Tensor) -> None:
    prompt = sequence.submission.prompt_ids
    targets = prompt[step.start + 1 : step.stop + 1]
    count = sequence.answer.params.num_prompt_alternatives or 0
    sequence.prompt_logprobs.extend(target_logprobs(logits_TV[: len(targets)], targets, count))
