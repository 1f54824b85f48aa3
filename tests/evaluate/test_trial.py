"""What is judged is what is served: logits of the training graph in both modes are those of the engine, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.answer import Answer
from headrace.engine.core.build import build_core
from headrace.engine.core.options import EngineOptions
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.submission import Submission
from headrace.evaluate.trial import Trial, decoder_reach, judge_trials, plan_trial
from headrace.models.deepseek_v41.batch import Mode
from headrace.train.data.packing import IGNORE, next_token_labels
from headrace.train.graph import Document
from tests.evaluate.subjects import small_subject, subject_folder
from tests.traces import same_bits
from tests.train.graphs import token_ids


def trial_of(length: int, runs: tuple[tuple[int, int], ...]) -> Trial:
    """Return random tokens of which only the rows of runs are judged."""
    ids = token_ids(length, length, high=400)
    labels, asked = next_token_labels(ids), np.zeros(length, dtype=bool)
    for first, stop in runs:
        asked[first:stop] = True
    return Trial(ids, np.where(asked, labels, IGNORE), runs)


def served(mode: Mode, ids: np.ndarray, prompt: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return what the engine computes for a prompt, read in chunks, and then for every later token of `ids`."""
    rows: list[Tensor] = []

    def take(self: Answer, token_id: int, logits_V: Tensor) -> str:
        rows.append(logits_V)
        return real(self, token_id, logits_V)

    real, forced = Answer.take, iter(ids[prompt:].tolist())
    engine = build_core(subject_folder(), EngineOptions(mode=mode, chunk=16, cache_tokens=512), None, None)
    wanted = SamplingParams(max_tokens=len(ids) - prompt, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "take", take)
        patch.setattr("headrace.engine.core.answering.sample_batch", lambda logits, samplers: [next(forced)])
        engine.submit(Submission(request_id="one", prompt_ids=ids[:prompt], params=wanted, seed=0, submitted=0.0))
        while not engine.is_idle:
            engine.step()
    return torch.stack(rows)


def logits_of(trial: Trial, mode: Mode) -> Tensor:
    """Return the logits of the judged rows of a trial."""
    subject = small_subject()
    plan = plan_trial(trial, subject.config, (mode,))
    with torch.no_grad():
        output = subject.graph().forward([plan.document], subject.options())
        return output.logits(output.hidden_TD[torch.from_numpy(plan.places[mode])])


@pytest.mark.parametrize("mode", ["full", "replay"])
def test_judged_logits_are_those_the_engine_serves(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is far longer than what the decoder's windows reach in both modes, so its start is really left out."""
    prompt, length = 81, 88
    trial = trial_of(length, ((prompt - 1, length),))
    judged = replace(trial, labels=np.where(trial.labels == IGNORE, IGNORE, trial.labels))
    logits = logits_of(judged, mode)
    wanted = served(mode, trial.token_ids, prompt, monkeypatch)[: len(logits)]
    assert len(logits) == length - prompt  # the last token has no label
    assert same_bits(logits, wanted)
    others = served("replay" if mode == "full" else "full", trial.token_ids, prompt, monkeypatch)[: len(logits)]
    assert not same_bits(logits, others)


def test_full_rows_from_within_reach_are_those_of_the_whole_document_and_closer_ones_are_not() -> None:
    subject = small_subject()
    trial, reach = trial_of(90, ((80, 89),)), decoder_reach(subject.config)
    assert 0 < reach < 80
    with torch.no_grad():
        whole = subject.graph().forward([Document(trial.token_ids)], subject.options()).logits()[80:89]
    assert same_bits(logits_of(trial, "full"), whole)
    # a start a whole window later than the reach allows loses something
    assert not same_bits(logits_of(trial, "replay"), whole)


def test_a_trial_costs_the_same_beside_others_and_with_other_modes() -> None:
    subject = small_subject()
    trials = [trial_of(60, ((30, 40), (50, 59))), trial_of(77, ((70, 76),)), trial_of(33, ((20, 32),))]
    together = judge_trials(subject.graph(), subject.options(), trials, ("full", "replay", "cold"))
    for trial, found in zip(trials, together, strict=True):
        for mode in ("full", "replay", "cold"):
            (alone,) = judge_trials(subject.graph(), subject.options(), [trial], (mode,))
            assert np.array_equal(alone[mode].nats, found[mode].nats)
            assert np.array_equal(alone[mode].rows, np.concatenate([np.arange(*run) for run in trial.runs]))
        assert len({found[mode].nats.sum() for mode in found}) == 3


def test_nats_and_hits_are_those_of_the_labels() -> None:
    subject = small_subject()
    trial = trial_of(50, ((40, 49),))
    logits = logits_of(trial, "replay").double()
    (found,) = judge_trials(subject.graph(), subject.options(), [trial], ("replay",))
    labels = torch.from_numpy(trial.labels[40:49])
    costs = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    assert np.allclose(found["replay"].nats, costs, atol=1e-4)  # float32 logits against float64
    assert np.array_equal(found["replay"].is_right, (logits.argmax(1) == labels).numpy())
    greedy = replace(trial, labels=np.full(50, IGNORE))
    greedy.labels[40:49] = logits.argmax(1).numpy()
    (right,) = judge_trials(subject.graph(), subject.options(), [greedy], ("replay",))
    assert right["replay"].is_right.all()
    assert not found["replay"].is_right.all()
