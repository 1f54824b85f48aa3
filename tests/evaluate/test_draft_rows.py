"""Rows to calibrate on are the rounds that drafting one prompt after the other has, and those of the engine."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.engine.core.build import build_core
from headrace.engine.core.options import EngineOptions
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission
from headrace.evaluate.draft_rows import RowSettings, collect_rows
from headrace.evaluate.drafting import count_accepted, write_greedily
from headrace.evaluate.held_out import HeldOut, read_held_out
from headrace.evaluate.subject import Subject, load_subject
from headrace.models.deepseek_v41.draft import Drafter
from headrace.train.calibration import Calibration
from tests.evaluate.subjects import subject_folder, write_subject

SIZES = RowSettings(prompt_tokens=21, stride_tokens=300, tokens=14)
BLOCK = 3


def held_out_of(subject: Subject) -> HeldOut:
    return read_held_out(subject.path.parent / "held.jsonl", subject.encoder)


def prompts_of(held_out: HeldOut) -> list[tuple[int, np.ndarray]]:
    found = []
    for document in range(len(held_out.text)):
        ids = held_out.ids(document)
        for start in range(1, len(ids) - SIZES.prompt_tokens, SIZES.stride_tokens):
            found.append((document, np.append(ids[:1], ids[start : start + SIZES.prompt_tokens - 1])))
    return found


def rows_of(subject: Subject) -> Calibration:
    return collect_rows(subject.model, subject.tokenizer.size, held_out_of(subject), SIZES, lambda _line: None)


def test_rows_are_the_rounds_of_one_prompt_after_the_other() -> None:
    subject = load_subject(subject_folder())
    model, rows = subject.model, rows_of(subject)
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    wanted, owners, positions = [], [], []
    for document, prompt in prompts_of(held_out_of(subject)):
        one = write_greedily(model, prompt, SIZES.tokens)
        place = 0
        while place + BLOCK + 1 < SIZES.tokens and place + BLOCK + 1 < len(one.token_ids) - len(prompt):
            kept = count_accepted(model, drafter, one, len(prompt) - 1 + place, one)
            wanted.append(kept)
            owners.append(document)
            positions.append(len(prompt) - 1 + place)
            place += kept + 1
    assert len(set(owners)) > 2
    assert rows.document.tolist() == owners
    assert rows.position.tolist() == positions
    assert rows.accepted.sum(1).tolist() == wanted
    assert rows.confidence.shape == rows.accepted.shape == (len(wanted), BLOCK)
    assert rows.confidence.isfinite().all()
    assert rows.is_round.all()
    assert np.unique(rows.confidence[:, 0].numpy()).size > 5


def test_rows_are_what_the_engine_drafts_and_keeps() -> None:
    subject = load_subject(subject_folder())
    rows = rows_of(subject)
    options = EngineOptions(
        threads=1, drafting="always", num_slots=1, has_prefix_cache=False, trace_steps=10_000, cache_tokens=512
    )
    core = build_core(subject_folder(), options, None, None)
    drafter = core._drafting.drafter
    made, propose = {}, drafter.propose

    def listening(wanted):
        found = propose(wanted)
        made.update({(core._arrivals, wanted[0].state.length): found[0].confidences})
        return found

    drafter.propose = listening
    for number, (_, prompt) in enumerate(prompts_of(held_out_of(subject))):
        params = SamplingParams(max_tokens=SIZES.tokens)
        core.submit(Submission(request_id=str(number), prompt_ids=prompt, params=params, seed=0, submitted=0.0))
        while not core.is_idle:
            core.step()
    seen = set()
    for trace in core.traces.newest():
        for one in trace.requests:
            if one.kind == "decode" and one.drafts_made == BLOCK:
                number = int(one.request_id.partition("/")[0]) + 1
                seen.add((made[number, one.start], one.start - 1, one.drafts_accepted))
    columns = map(tuple, rows.confidence.tolist()), rows.position.tolist(), rows.accepted.sum(1).tolist()
    rounds = list(zip(*columns, strict=True))
    assert set(rounds) <= seen
    assert len(rounds) > 10


def test_a_model_without_drafts_and_a_text_without_long_documents_are_refused(tmp_path: Path) -> None:
    subject = load_subject(subject_folder())
    with pytest.raises(UserError, match="no document of 5000 tokens"):
        collect_rows(subject.model, 9, held_out_of(subject), RowSettings(prompt_tokens=5000), lambda _line: None)
    bare = load_subject(write_subject(tmp_path, draft=False))
    with pytest.raises(UserError, match="no draft module"):
        rows_of(bare)
