"""The server's document names the metrics, paths and options that exist, and no others."""

import re
import subprocess
import sys

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.architecture.tree import ROOT
from tests.server.inside import Inside

TEXT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)[1]


def test_the_listed_metrics_are_those_that_are_told(opened: Inside) -> None:
    for n in (1, 5):  # one answer, and one refusal by the engine
        httpx2.post(f"{opened.base_url}/v1/completions", json={"prompt": "x", "n": n, "max_tokens": 2}, timeout=60)
    text = httpx2.get(f"{opened.base_url}/metrics", timeout=30).text
    told = {family.name: {*()} for family in text_string_to_metric_families(text)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told[family.name] |= set(sample.labels) - {"model_name", "le"}
    listed = dict(re.findall(r"`((?:vllm|headrace):\w+)(?:\{([\w,]+)\})?`", section("Metrics")))
    assert sorted(listed) == sorted(told)
    labels = {name: set(found.split(",")) if found else set() for name, found in listed.items()}
    unseen = {name for name, found in told.items() if not found}  # nothing was drafted, so less is told of that
    drafting = {name for name in listed if name.startswith("headrace:draft_")}
    assert {name for name in unseen if labels[name]} <= {"vllm:spec_decode_num_accepted_tokens_per_pos", *drafting}
    assert {name: found for name, found in labels.items() if name not in unseen} == {
        name: found for name, found in told.items() if found
    }


def test_the_listed_paths_are_those_of_the_openapi_document(opened: Inside) -> None:
    document = httpx2.get(f"{opened.base_url}/openapi.json").json()
    there = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    listed = set(re.findall(r"`(GET|POST|DELETE) (/[\w/{}]*)`", section("Endpoints")))
    page = {("GET", path) for path in ("/", "/explain", "/page/{name}")}  # files, of which the document says nothing
    assert listed - page == there


def test_the_listed_options_are_those_of_the_command() -> None:
    command = [sys.executable, "-m", "headrace", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    there = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", done.stdout)) - {"--help"}
    assert set(re.findall(r"--[a-z][a-z-]*", section("Options"))) == there
