"""`EngineCore`: plans a step, carries it out, samples, and tells what became certain."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from headrace.core.errors import InternalError, UserError
from headrace.engine.answer import Answer
from headrace.engine.core.account import Accountant
from headrace.engine.core.answering import Answering
from headrace.engine.core.drafts import Drafting
from headrace.engine.core.events import Event, PrefillEvent
from headrace.engine.core.holdings import Holdings
from headrace.engine.core.image_rows import PromptImages
from headrace.engine.core.limits import scheduler_config
from headrace.engine.core.memory_plan import MemoryGuard, MemoryPlan
from headrace.engine.core.ngram_feed import NgramFeed
from headrace.engine.core.options import EngineOptions
from headrace.engine.core.prefix_cache import PrefixCache
from headrace.engine.core.request_memory import RequestMemory, request_budget
from headrace.engine.core.samplers import Samplers
from headrace.engine.core.sequence import Sequence
from headrace.engine.core.step_rows import Candidate, StepRows, damaged, lay_out, note_xrays, run
from headrace.engine.core.totals import Totals
from headrace.engine.core.trace import TraceLog
from headrace.engine.core.trace_step import trace_of
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.result import FinishReason
from headrace.engine.sampling.structured import Compiled
from headrace.engine.scheduler.entry import EndReason
from headrace.engine.scheduler.plan import Fork, StepPlan
from headrace.engine.scheduler.request import Match, Request, count_holders
from headrace.engine.scheduler.scheduler import Scheduler
from headrace.engine.submission import Submission
from headrace.engine.threads import Threads
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.text.tokenizer import Tokenizer

_REASONS: Mapping[EndReason, FinishReason] = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CANCELLED: "cancelled",
    EndReason.DEADLINE: "deadline",
}


class EngineCore:
    """Serves many requests with one model. Owns the model's use, the pools, the queue; one thread calls it."""

    def __init__(
        self,
        model: DeepseekV41,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        plan: MemoryPlan,
        *,
        threads: Threads,
        namespace: Mapping[str, str],
        drafting: Drafting | None = None,
    ) -> None:
        self.model, self.tokenizer, self.options, self.memory = model, tokenizer, options, plan
        config = model.config
        self.max_context = min(options.max_context or config.max_positions, config.max_positions)
        self._threads = threads
        shape = model.state_shape
        self._holdings = Holdings(shape, plan, options.num_slots, model.device, audited=options.is_audited)
        self.cache = PrefixCache(
            self._holdings.blocks,
            plan.snapshots,
            {**namespace, "numerics": model.numerics.name},
            model.addressing,
            every=options.snapshot_every,
            is_on=options.has_prefix_cache,
            ttl_s=options.snapshot_ttl_s,
        )
        self.cache.open_tiers(options)
        rules = scheduler_config(options, plan, config, self.max_context)
        self._scheduler = Scheduler(rules)
        self._ngrams = NgramFeed(model, rules.chunk, rules.max_rows, rules.num_slots)
        self._accountant = Accountant(config, shape, model.ngram_bytes_per_token)
        self.samplers = Samplers(config, tokenizer)
        self._request_memory = RequestMemory(request_budget(self.max_context))
        self._sequences: dict[str, Sequence] = {}
        self._drafting = drafting
        self.traces = TraceLog(options.trace_steps, options.trace_file)
        self.totals = Totals(ngram=self._ngrams.take_counts())
        self._answering = Answering(self._sequences, self._scheduler, self.totals, model.numerics.name)
        self._guard = MemoryGuard(plan)
        self._began = time.monotonic()
        self._steps = self._arrivals = 0

    # ---------------------------------------------------------------------------------------------------- requests

    def submit(self, submission: Submission, compiled: Compiled | None = None) -> None:
        """Take a request; its structure is compiled here if nobody did before.

        Raises:
            UserError: something in it is refused, or it can never fit (CapacityError), or too many wait.
        """
        params, name = submission.params, submission.request_id
        mode = params.mode or ("full" if params.num_prompt_alternatives is not None else self.options.mode)
        sampler = self.samplers.start(submission, compiled)
        answer = Answer(submission.prompt_ids, sampler, self.tokenizer, self.max_context)
        images = PromptImages(submission.images) if submission.images else None
        chain = self.cache.chain(submission.prompt_ids, params.cache_salt, images)
        room = max(0, min(params.max_tokens, self.max_context - len(submission.prompt_ids)))
        self._arrivals += 1
        request = Request(
            request_id=choice_id(name, 0),
            arrival=self._arrivals,
            prompt_tokens=len(submission.prompt_ids),
            max_new_tokens=room,
            priority=params.priority,
            deadline=submission.deadline,
            mode=mode,
            children=tuple(choice_id(name, index) for index in range(1, params.n)),
        )
        self._scheduler.check(request)
        self._request_memory.take(submission, room)
        self._scheduler.submit(request)
        for index in range(params.n):
            self._sequences[choice_id(name, index)] = Sequence(
                submission=submission,
                request_id=choice_id(name, index),
                choice=index,
                answer=answer if index == 0 else answer.fork(index),
                chain=chain,
                mode=mode,
                can_replay=(params.resume or self.options.resume) == "replay",
                images=images,
            )

    def cancel(self, request_id: str) -> None:
        """End a request, with all its answers, at the next step boundary; unknown ones are ended already."""
        for sequence in [one for one in self._sequences.values() if one.submission.request_id == request_id]:
            self._scheduler.cancel(sequence.request_id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done."""
        return self._scheduler.is_idle

    def close(self) -> None:
        """Let go of the files."""
        self.traces.close()
        self.cache.close()
        self._ngrams.close()

    def audit(self) -> None:
        """Check every book against the pools.

        Raises:
            InternalError: the first block or slot that is not free or held as the books say.
        """
        self._holdings.audit(self._sequences.values(), self.cache)

    def clear_cache(self, *, disk: bool = False) -> bool:
        """Forget every cached prompt, on disk if asked, and of told answers; return whether that was possible."""
        for sequence in self._sequences.values():
            if sequence.is_over:
                sequence.published = sequence.num_prompt + len(sequence.answer.token_ids)
                sequence.kept = sequence.published if disk else sequence.kept
        return self.cache.clear(disk=disk)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody refers to."""
        return self._holdings.blocks.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that the prefix cache refers to."""
        return len(set(self.cache.index.block_ids))

    @property
    def pools(self) -> dict[str, int]:
        """What the pools and the prefix cache hold."""
        return self._holdings.counts(self.cache)

    @property
    def counts(self) -> dict[str, int]:
        """Requests per phase, and bytes of host memory in use."""
        return asdict(self._scheduler.counts)

    @property
    def draft_status(self) -> dict[str, float]:
        """What drafting gained or cost lately; empty without a drafter."""
        return {} if self._drafting is None else self._drafting.policy.status()

    # --------------------------------------------------------------------------------------------------------- a step

    def step(self) -> list[Event]:
        """Do one step and return what became certain.

        Raises:
            InternalError: a rule of the engine was broken; it cannot go on.
        """
        began = time.monotonic()
        self.cache.begin_step(self._sequences.values())
        drafts = {} if self._drafting is None else self._drafting.propose(self._sequences.values())
        plan = self._scheduler.plan(began, self._holdings.pool(self.cache), self._match, drafts)
        events = self._end(plan)
        self._carry_out(plan, began)
        self.totals.add_plan(plan)
        rows = lay_out(plan, self._sequences, self._accountant, self.model, self._guesses(plan))
        rows.draft_gain = None if self._drafting is None else self._drafting.gain
        is_moved = rows.spans or plan.ended or plan.preemptions or plan.swap_ins or self._scheduler.is_idle
        if not is_moved and not self.cache.wait():
            raise InternalError(f"no request can go on: {dict(plan.waits)}")  # a plan always moves somebody
        if rows.spans:
            self._use_threads(self._threads.prefill if rows.has_prefill else self._threads.decode)
            if rows.has_prefill:
                self._ngrams.ahead(rows.spans, plan.prefills, self._sequences)
            events += self._run(plan, rows, began)
            rows.reads = self._ngrams.take_counts()
            self.totals.ngram.add(rows.reads)
            self.totals.add_time(time.monotonic() - began)
            self.cache.note_prefill(plan.prefills, time.monotonic() - began)
        if self.options.is_audited:
            self.audit()
        self._steps += 1
        self._guard.after_step()
        if self.traces.is_on:
            self._note(plan, rows, began)
        return events

    def _guesses(self, plan: StepPlan) -> dict[str, Proposal]:
        """Return the guesses that a plan has rows for."""
        if self._drafting is None or not self._drafting.is_drafting:
            return {}
        rows = plan.decodes
        return {row.request_id: self._drafting.take(self._sequences[row.request_id], row.drafts) for row in rows}

    def _match(self, request: Request, starting: tuple[str, ...]) -> Match:
        sequence = self._sequences[request.request_id]
        found = self.cache.look_up(sequence)
        if found is None:
            return Match(is_loading=True)
        tables = {one.request_id: one.block_ids for one in self._sequences.values() if one is not sequence}
        tables |= {name: list(self.cache.matched_blocks(name)) for name in starting}
        leader, tokens = self._leader(sequence, found.row, starting)
        return Match(
            cached_tokens=found.num_tokens,
            first_row=found.row,
            holders=count_holders(found.block_ids, tables),
            waits_for=leader,
            wait_tokens=tokens,
        )

    def _leader(self, sequence: Sequence, row: int, starting: tuple[str, ...]) -> tuple[str | None, int]:
        """Return a request, reading or starting now, that makes much more of this prompt's beginning reusable."""
        best, most = None, row + self.model.config.window
        if not self.options.has_prefix_cache or sequence.mode == "full":
            return None, 0
        for other in self._sequences.values():
            if other.choice or other is sequence:
                continue
            if other.state is not None:
                length = other.state.length
            elif other.request_id in starting:
                length = self.cache.matched_row(other.request_id)
            else:
                continue
            common = other.chain.common(sequence.chain)
            if length < other.num_prompt and common > max(most, length):
                best, most = other, common
        return (None, 0) if best is None else (best.request_id, most)

    def _end(self, plan: StepPlan) -> list[Event]:
        """Let go of what is over; what ended from outside is told now."""
        events: list[Event] = []
        for ended in plan.ended:
            sequence = self._sequences.pop(ended.request_id)
            if not sequence.is_over and ended.reason in _REASONS:
                text = sequence.answer.end(_REASONS[ended.reason])
                events += self._answering.over(sequence, None, text)
            if ended.reason is not EndReason.ERROR:
                self.cache.publish(sequence, is_end=True)
            self._holdings.end(sequence)
            if self._drafting is not None:
                self._drafting.forget(sequence.request_id)
            self._request_memory.end_one(sequence.submission.request_id)
        return events

    def _carry_out(self, plan: StepPlan, now: float) -> None:
        holdings, cache = self._holdings, self.cache
        for preemption in plan.preemptions:
            holdings.swap_out(self._sequences[preemption.request_id], preemption.blocks, cache)
        cache.forget(keep=(one.request_id for one in plan.admissions))
        wanted = {one.request_id: one.blocks for one in plan.allocations}
        for admission in plan.admissions:
            sequence = self._sequences[admission.request_id]
            holdings.start(sequence, cache)
            sequence.started = now
        needed = sum(one.blocks for one in plan.swap_ins)
        targets = {}
        for name, count in wanted.items():
            admitted = next((one for one in plan.admissions if one.request_id == name), None)
            held = len(self._sequences[name].block_ids)
            targets[name] = (held if admitted is None else admitted.shared_blocks) + count
            needed += targets[name] - held
        if needed > holdings.blocks.num_free:
            cache.index.evict(needed - holdings.blocks.num_free)
        for back in plan.swap_ins:
            holdings.swap_in(self._sequences[back.request_id])
        for name, target in targets.items():
            holdings.extend(self._sequences[name], target)

    def _run(self, plan: StepPlan, rows: StepRows, began: float) -> list[Event]:
        events: list[Event] = []
        try:
            found = self._forward(rows)
        except UserError as error:  # no state has moved
            rows.drop_guesses(self._accountant)  # a guess must not fail its request
            failed = damaged(self.model, rows)
            if not failed and not rows.had_guesses:
                failed = [(sequence, error) for sequence in rows.sequences]
            events += [event for sequence, reason in failed for event in self._answering.fail(sequence, reason)]
            rows.drop([sequence.request_id for sequence, _ in failed])
            found = self._forward(rows) if rows.spans else []
        events += [event for sequence, error in rows.failed for event in self._answering.fail(sequence, error)]
        note_xrays(rows, self._steps, began)
        self.totals.add_rows(rows.sequences, rows.steps)
        for sequence, step in zip(rows.sequences, rows.steps, strict=True):
            sequence.counts.add(step.counts)
            sequence.replayed_rows += step.replayed_rows
            sequence.is_first_step = False
            if step.kind == "prefill" and not sequence.is_over:
                self.cache.publish(sequence, is_end=step.stop == sequence.num_prompt)
                if step.stop < sequence.num_prompt or step.start > 0 or sequence.xray is not None:
                    name = sequence.submission.request_id
                    events.append(PrefillEvent(request_id=name, tokens=step.stop, xray=sequence.xray))
        for one in plan.forks:
            child = self._fork(one)
            found += [replace(mine, sequence=child) for mine in found if mine.sequence.request_id == one.parent]
        events += self._answering.sample(found)
        for mine in found:
            self._settle(mine, rows)
        self._ngrams.sampled(mine.sequence for mine in found if mine.taken)
        if self._drafting is not None:
            for one in plan.forks:
                self._drafting.fork(self._sequences[one.parent], self._sequences[one.request_id])
            self._drafting.note_step(found, has_prefill=rows.has_prefill, seconds=time.monotonic() - began)
        return events

    def _forward(self, rows: StepRows) -> list[Candidate]:
        wants_taps = self._drafting is not None and self._drafting.wants_taps(has_prefill=rows.has_prefill)
        return run(self.model, rows, self.samplers.vocab_size, self._accountant, wants_taps=wants_taps)

    def _settle(self, one: Candidate, rows: StepRows) -> None:
        """Take back the rows of guesses that were wrong, and count the others."""
        sequence, step = one.sequence, rows.steps[one.place]
        kept = step.stop - step.start
        if one.guesses and sequence.state is not None:
            kept = max(1, one.taken)
            sequence.state.rollback(step.start + kept)
            if kept > 1:
                self._scheduler.accept(sequence.request_id, kept - 1)
            rows.steps[one.place] = replace(step, drafts_accepted=one.accepted)
            self.totals.add_drafts(len(one.guesses), one.accepted)
        if self._drafting is not None and one.taps is not None:
            decoded = kept if one.guesses else step.decoder_rows
            first = step.start if one.guesses else step.stop - step.decoder_rows
            self._drafting.note(sequence, first, one.taps[:decoded])

    def _fork(self, plan: Fork) -> Sequence:
        parent, child = self._sequences[plan.parent], self._sequences[plan.request_id]
        if plan.own_blocks > self._holdings.blocks.num_free:
            self.cache.index.evict(plan.own_blocks)
        if parent.is_over:  # its prompt could not be read
            self._holdings.hold(child, parent, plan)
            return child
        self._holdings.fork(parent, child)
        child.chain = parent.chain.copy()
        child.started, child.cached_tokens = parent.started, parent.cached_tokens
        child.cache_reason, child.is_approximate = parent.cache_reason, parent.is_approximate
        child.published, child.is_first_step = parent.published, False
        child.kept, child.kept_windows = parent.kept, parent.kept_windows
        child.prompt_logprobs = parent.prompt_logprobs
        return child

    # ---------------------------------------------------------------------------------------------------------- books

    def _note(self, plan: StepPlan, rows: StepRows, began: float) -> None:
        books = (self._holdings.blocks.num_free, len(self.cache.index.block_ids))
        times = (began - self._began, time.monotonic() - began)
        self.traces.add(trace_of(self._steps, times, plan, rows, books))

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def choice_id(request_id: str, choice: int) -> str:
    """Return the scheduler's name of one answer of a request."""
    return f"{request_id}/{choice}"
