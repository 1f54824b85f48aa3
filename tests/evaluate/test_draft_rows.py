"""Rows to calibrate on are what the drafter drafts and the model writes, position by position."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.evaluate.draft_rows import RowSettings, collect_rows
from headrace.evaluate.drafting import count_accepted, write_greedily
from headrace.evaluate.held_out import HeldOut, read_held_out
from headrace.evaluate.subject import Subject, load_subject
from headrace.models.deepseek_v41.draft import Drafter
from tests.evaluate.subjects import subject_folder, write_subject

SIZES = RowSettings(prompt_tokens=21, stride_tokens=120, tokens=6)


def held_out_of(subject: Subject) -> HeldOut:
    return read_held_out(subject.path.parent / "held.jsonl", subject.encoder)


def test_rows_are_what_one_prompt_after_the_other_gives() -> None:
    subject = load_subject(subject_folder())
    model, held_out, block = subject.model, held_out_of(subject), 3
    rows = collect_rows(model, held_out, SIZES, lambda _line: None)
    drafter = Drafter(model.config, model.parameters, model.frequencies.plain)
    wanted, owners = [], []
    for document in range(len(held_out.text)):
        ids = held_out.ids(document)
        for start in range(1, len(ids) - SIZES.prompt_tokens, SIZES.stride_tokens):
            prompt = np.append(ids[:1], ids[start : start + SIZES.prompt_tokens - 1])
            one = write_greedily(model, prompt, SIZES.tokens)
            for place in range(len(one.token_ids) - len(prompt) - block):
                wanted.append(count_accepted(model, drafter, one, len(prompt) - 1 + place, one))
                owners.append(document)
    assert len(set(owners)) > 2
    assert rows.document.tolist() == owners
    assert rows.accepted.sum(1).tolist() == wanted
    assert rows.confidence.shape == rows.accepted.shape == (len(wanted), block)
    assert np.isfinite(rows.confidence).all()
    assert np.unique(rows.confidence[:, 0]).size > 5


def test_a_model_without_drafts_and_a_text_without_long_documents_are_refused(tmp_path: Path) -> None:
    subject = load_subject(subject_folder())
    with pytest.raises(UserError, match="no document of 5000 tokens"):
        collect_rows(subject.model, held_out_of(subject), RowSettings(prompt_tokens=5000), lambda _line: None)
    bare = load_subject(write_subject(tmp_path, draft=False))
    with pytest.raises(UserError, match="no draft module"):
        collect_rows(bare.model, held_out_of(bare), SIZES, lambda _line: None)
