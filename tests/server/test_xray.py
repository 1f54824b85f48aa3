"""`/v1/xray/{id}`: what a real answer took, live and afterwards, in the words that the page reads."""

import itertools
import json
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from headrace.core.shipped import shipped_model
from headrace.engine.core.events import TokenEvent
from headrace.engine.core.trace import RequestStep, RowCounts
from headrace.engine.core.xray import Reads, StepXray
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.inspect import report
from headrace.server.xray import XrayStore, token_texts
from headrace.text.tokenizer import Tokenizer
from tests.architecture.tree import ROOT
from tests.server.serving import Served

PROMPT = "import os\n\n\ndef read_config(path):\n" * 30


def call(served: Served, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {**served.headers, "content-type": "application/json"}
    return urlopen(Request(served.base_url + path, data=data, headers=headers), timeout=60)


def events(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield name, json.loads(line.removeprefix("data: "))


def complete(served: Served, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "temperature": 0.8, "xray": True, **more}
    with call(served, "/v1/completions", body) as answer:
        return dict(json.load(answer))


@pytest.fixture(scope="module")
def told(served: Served) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """A completion, and its X-ray."""
    answer = complete(served, cache_salt="test_xray")
    with call(served, f"/v1/xray/{answer['id']}") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        return answer, list(events(stream))


def test_it_begins_with_the_model_and_ends_with_the_result(told: Any) -> None:
    answer, found = told
    names = [name for name, _ in found]
    assert names[0] == "start"
    assert names[-1] == "end"
    assert names == sorted(names, key=["start", "prefill", "token", "end"].index)
    end = found[-1][1]
    assert end["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert end["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == names.count("token")


def test_the_model_is_described_as_inspect_does(told: Any) -> None:
    model = told[1][0][1]["model"]
    facts = report(load_config(shipped_model()))
    for name in ("layers", "kv_bytes_per_token", "window_bytes_per_sequence", "state_bytes_per_sequence"):
        assert model[name] == facts[name]
    assert model["num_layers"] == 6
    assert model["gqa8_bytes_per_token"] == 6 * 2 * model["gqa8_heads"] * model["head_dim"] * 2
    assert model["gqa8_heads"] == 4, "headrace-nano has four heads, so the comparison takes four"


def test_prompt_and_answer_are_told_token_by_token(told: Any) -> None:
    answer, found = told
    start = found[0][1]
    assert len(start["prompt_pieces"]) == start["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert "".join(start["prompt_pieces"]).endswith(PROMPT)
    tokens = [data for name, data in found if name == "token"]
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
    assert [token["position"] for token in tokens] == [start["prompt_tokens"] + index for index in range(12)]


def test_steps_of_the_prompt_cover_it_and_the_decoder_sees_its_end(told: Any) -> None:
    start = told[1][0][1]
    steps = [data for name, data in told[1] if name == "prefill"]
    assert steps[0]["start"] == 0
    assert steps[-1]["stop"] == start["prompt_tokens"]
    assert all(one["stop"] == other["start"] for one, other in itertools.pairwise(steps))
    assert sum(step["decoder_rows"] for step in steps) == start["model"]["window"]
    assert steps[0]["cache_reason"] == "nothing cached"


def test_every_token_says_where_it_read(told: Any) -> None:
    start = told[1][0][1]
    ratios = {str(layer["id"]): layer["ratio"] for layer in start["model"]["layers"]}
    for token in [data for name, data in told[1] if name == "token"]:
        assert set(token["reads"]) == {"0", "1", "3", "4"}
        for layer, reads in token["reads"].items():
            first, stop = reads["window"]
            assert 0 < stop - first <= start["model"]["window"]
            tokens = sum(stop - first for first, stop in reads["entries"])
            assert tokens == 64 * ratios[layer]
            assert all(0 <= first < stop <= token["position"] for first, stop in reads["entries"])


def test_a_running_answer_is_followed_live(served: Served) -> None:
    came: list[float] = []
    body = {"prompt": "import os\n", "max_tokens": 40, "ignore_eos": True, "stream": True, "xray": True}
    with call(served, "/v1/completions", body) as answer:
        response_id = answer.headers["x-response-id"]
        reader = threading.Thread(target=lambda: [None for _ in answer])
        reader.start()
        with call(served, f"/v1/xray/{response_id}") as stream:
            for name, _ in events(stream):
                if name == "token":
                    came.append(time.monotonic())
        reader.join()
    assert len(came) == 40
    assert came[-1] - came[0] > 0.1, "tokens came as they were made, not all at the end"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
def test_every_stream_of_a_conversation_names_its_response(served: Served, path: str, body: dict[str, Any]) -> None:
    with call(served, path, {**body, "stream": True, "xray": True}) as answer:
        response_id = answer.headers["x-response-id"]
        assert response_id in answer.read().decode()
    with call(served, f"/v1/xray/{response_id}") as stream:
        assert list(events(stream))[-1][1]["finish_reason"] == "length"


def test_an_answer_that_is_left_has_an_end(served: Served) -> None:
    body = {"prompt": "import os\n", "max_tokens": 4000, "ignore_eos": True, "stream": True, "xray": True}
    with call(served, "/v1/completions", body) as answer:
        response_id = answer.headers["x-response-id"]
        answer.readline()
    with call(served, f"/v1/xray/{response_id}") as stream:
        name, data = list(events(stream))[-1]
    assert (name, data["finish_reason"]) == ("end", "cancelled")


def test_the_documented_fields_are_the_ones_that_come(told: Any) -> None:
    text = (ROOT / "docs" / "xray.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for name, data in told[1]:
        fields = set(data) | set(data.get("model", {}))
        cells = " ".join(re.findall(r"^\| (.+?) \|", sections[name], re.M))
        listed = set(re.findall(r"`(\w+)`", cells or sections[name])) - {"cancelled"}
        if name == "start":
            listed |= {"model", "prompt_tokens", "prompt_pieces"}
        assert fields == listed, name


def refused(served: Served, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Return status and message of a refusal."""
    with pytest.raises(HTTPError) as error:
        urlopen(Request(served.base_url + path, headers=headers), timeout=10)
    with error.value as answer:
        return answer.code, str(json.load(answer)["error"]["message"])


def test_answers_that_did_not_ask_have_none_and_nobody_reads_without_a_key(served: Served) -> None:
    path = f"/v1/xray/{complete(served, xray=False, max_tokens=1)['id']}"
    status, message = refused(served, path, served.headers)
    assert status == 404
    assert "xray: true" in message
    assert refused(served, path, {})[0] == 401


def test_the_store_keeps_the_newest_within_number_and_bytes() -> None:
    config = load_config(shipped_model())
    store = XrayStore(config, "nano", None, max_answers=2)
    for name in "abc":
        store.begin(name, [0, 1, 2])
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    store = XrayStore(config, "nano", None, max_bytes=8 * 2000)
    for name in "abc":
        store.begin(name, range(1000))
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]


def test_token_texts_join_to_the_text_with_characters_whole() -> None:
    tokenizer = Tokenizer.from_file(Path(shipped_model()) / "tokenizer.json")
    text = "größe = '한국어 🙂'\n"
    ids = tokenizer.encode(text)
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_the_front_reads_events_with_xrays_without_torch() -> None:
    """Importing torch would hold up the first answer by seconds."""
    step = RequestStep(
        request_id="r", kind="decode", start=1, stop=2, decoder_rows=1, replayed_rows=0, counts=RowCounts()
    )
    xray = StepXray(step=1, seconds=0.1, request=step, reads={0: Reads(window=(0, 2), entries=((0, 2),))})
    event = pickle.dumps(TokenEvent(request_id="r", choice=0, token_id=3, text="a", xray=xray))
    code = f"import pickle, sys, headrace.server.xray\npickle.loads({event!r})\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
