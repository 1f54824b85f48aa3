"""headrace-nano as it ships: what it is made of, that it answers, that it knows text it never saw, and far context.

Thresholds are those that the model is promised to hold; `headrace evaluate nano` measures them on more.
"""

import ast
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.cli import main
from headrace.core.shipped import HELD_OUT_NAME, SHIPPED_MODEL
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.plan import build_plan
from headrace.train.data import special_tokens
from headrace.train.data.draws import Draws
from headrace.train.data.licences import is_permissive, names_copyleft
from headrace.train.data.tasks.pairs import PairTask, PairVocabulary
from headrace.train.recipes.nano import HELD_OUT

MAX_BYTES = 30_000_000
BITS_PER_BYTE = 1.75
DOCUMENTS = 4
TOKENS = 1024
PROMPTS = (
    "def read_config(path):\n",
    "class Reader:\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Config:\n    def __init__(self, name):\n",
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1) as one:
        yield one


def held_out() -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHIPPED_MODEL / HELD_OUT_NAME).read_text(encoding="utf-8").splitlines()]


def inspected(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", str(SHIPPED_MODEL), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_is_small_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(file.stat().st_size for file in SHIPPED_MODEL.iterdir()) <= MAX_BYTES
    assert main(["inspect", str(SHIPPED_MODEL), "--verify", "--json"]) == 0
    assert "MODEL_CARD.md" in {file.name for file in SHIPPED_MODEL.iterdir()}


def test_every_text_mechanism_is_on() -> None:
    config = load_config(SHIPPED_MODEL)
    plans = [plan for plan in build_plan(config) if not plan.is_draft]
    sources = [plan for plan in plans if plan.role == "full"]
    assert sum(plan.ratio == 2 for plan in sources) >= 2
    assert sum(plan.ratio == 1 and plan.has_candidates for plan in sources) == 1
    assert {"reindex", "reuse"} <= {plan.role for plan in plans}
    assert config.num_streams == 4
    assert sum(plan.has_ngram for plan in plans) == 2
    assert config.window == 128
    assert config.num_experts >= 16
    assert config.draft is not None
    assert 1 <= config.num_draft_layers <= 3
    assert config.vision is None
    assert config.max_positions >= 16_384


def test_experts_are_fp4_and_dense_weights_and_tables_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    stored = inspected(capsys)["bytes_by_dtype"]
    assert stored["F8_E4M3"] > 5_000_000  # dense matrices and n-gram tables
    assert stored["I8"] > 3_000_000  # packed experts
    assert set(stored) == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}


def test_held_out_text_is_of_held_out_packages_under_permissive_licences() -> None:
    documents = held_out()
    assert {one["name"].split(":")[1] for one in documents} == set(HELD_OUT)
    for one in documents:
        assert is_permissive(one["licence"]), one["name"]
        assert not names_copyleft(one["text"]), one["name"]


def test_it_is_what_an_llm_without_a_path_loads_and_it_writes_python(llm: LLM) -> None:
    results = llm.generate(list(PROMPTS), SamplingParams(max_tokens=120))
    texts = [prompt + result.text for prompt, result in zip(PROMPTS, results, strict=True)]
    assert sum(_is_python(text.rpartition("\n")[0]) for text in texts) >= len(PROMPTS) // 2  # the last line is cut off


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_generate_without_a_path_answers_and_does_not_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "def read_config(path):", "--no-draft", "--max-tokens", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"]
    assert document["draft"] == {"proposed": 0, "accepted": 0, "rounds": 0}


def test_it_predicts_text_it_never_saw(llm: LLM) -> None:
    bits = count = 0.0
    for one in held_out()[:: len(held_out()) // DOCUMENTS][:DOCUMENTS]:
        ids = llm.encode(one["text"])[:TOKENS].tolist()
        (result,) = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=True))
        assert result.prompt_logprobs is not None
        bits -= sum(one.logprob for one in result.prompt_logprobs if one is not None) / np.log(2)
        assert llm.tokenizer is not None
        count += len(llm.tokenizer.decode(ids).encode())
    assert bits / count <= BITS_PER_BYTE


def test_it_finds_pairs_far_outside_every_window(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    noise = np.array(tokenizer.encode(held_out()[3]["text"]), dtype=np.int64)
    first = special_tokens.FIRST_RESERVED_ID
    vocabulary = PairVocabulary(num_keys=16, num_values=16, first_pair_id=first, noise_ids=noise, is_noise_text=True)
    task = PairTask(vocabulary=vocabulary, num_pairs=16, num_queries=12, min_distance=129)
    right = asked = 0
    for row in range(3):
        sample = task.make(Draws(5, "shipped", row), TOKENS)
        assert sample is not None
        places = np.flatnonzero(sample.labels >= 0)
        prompts = [sample.token_ids[: place + 1].tolist() for place in places]
        said = [result.token_ids[0] for result in llm.generate(prompts, SamplingParams(max_tokens=1))]
        right += int((np.array(said) == sample.labels[places]).sum())
        asked += len(places)
    assert asked == 36
    assert right / asked >= 0.9


@pytest.mark.full
def test_the_evaluation_holds_what_the_model_card_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nano", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bpb"]["full"]["fp4"] <= BITS_PER_BYTE
    assert found["bpb"]["replay"]["fp4"] <= 1.01 * found["bpb"]["full"]["fp4"]
    assert found["bpb"]["full"]["fp4"] <= 1.01 * found["bpb"]["full"]["plain"]
    for cell in found["retrieval"]:
        if cell["task"] == "pairs" and cell["tokens"] <= 4096:
            assert cell["accuracy"] >= (0.95 if cell["tokens"] <= 2048 else 0.9), cell
    assert found["accepted_per_round"] >= 1.5
    assert all(control["has_failed"] for control in found["controls"])
