"""Images through the official clients, on a random model with an image tower."""

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from PIL import Image

from headrace import LLM, ImagePrompt, SamplingParams
from headrace.core.shipped import SHIPPED_MODEL
from headrace.engine.images import image_rules
from headrace.models.deepseek_v41.config import from_json
from headrace.text.tokenizer import Tokenizer
from headrace.vision.preprocess import plan_image
from tests.factories import tiny_checkpoint, tiny_document
from tests.server.serving import Served, serving

IMAGE_ID = 18  # of the shipped tokenizer
NAME = "sees"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that sees, with the shipped tokenizer in place of its own."""
    size = Tokenizer.from_file(SHIPPED_MODEL).size
    document = tiny_document()
    document |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": IMAGE_ID}
    document["text_config"] |= {"vocab_size": size, "engram_layer_ids": [], "max_position_embeddings": 2048}
    config = from_json(document)
    made = tiny_checkpoint(tmp_path_factory.mktemp(NAME), config)
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", made / "tokenizer.json")
    return made


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Served]:
    with serving(str(folder), "--model-name", NAME) as found:
        yield found


def png(seed: int, size: tuple[int, int] = (126, 84)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(served: Served, *images: bytes, **options: Any) -> Any:
    parts: list[Any] = [{"type": "text", "text": "What do you see?"}]
    parts += [{"type": "image_url", "image_url": {"url": url(data)}} for data in images]
    return OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0).chat.completions.create(
        **{
            "model": NAME,
            "messages": [{"role": "user", "content": parts}],
            "reasoning_effort": "none",
            "temperature": 0,
            "max_tokens": 8,
            "logprobs": True,
            **options,
        }
    )


def logprobs(answer: Any) -> list[float]:
    return [one.logprob for one in answer.choices[0].logprobs.content]


def test_an_image_counts_its_tokens_and_changes_the_answer(folder: Path, seeing: Served) -> None:
    answers = [chat(seeing, png(seed)) for seed in (1, 2)]
    joint = {"type": "text", "text": "What do you see?\n\n"}  # parts are joined by an empty line
    without = chat(seeing, messages=[{"role": "user", "content": [joint]}])
    with LLM(folder, threads=1) as llm:
        rules = image_rules(llm.config)
        tokens = plan_image(126, 84, rules).num_tokens
    assert [one.usage.prompt_tokens for one in answers] == [without.usage.prompt_tokens + tokens] * 2
    assert logprobs(answers[0]) != logprobs(answers[1])


def test_the_same_conversation_again_comes_from_the_cache_and_answers_the_same(seeing: Served) -> None:
    first, second = (chat(seeing, png(3), png(4)) for _ in range(2))
    assert logprobs(first) == logprobs(second)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2


def test_three_dialects_read_the_same_image_alike(seeing: Served) -> None:
    data = png(5)
    one = chat(seeing, data)
    text = {"type": "text", "text": "What do you see?"}
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    other = Anthropic(base_url=seeing.base_url, api_key="none", max_retries=0).messages.create(
        model=NAME, max_tokens=8, extra_body={"temperature": 0}, thinking={"type": "disabled"},
        messages=[{"role": "user", "content": [text, {"type": "image", "source": source}]}],
    )  # fmt: skip
    third = OpenAI(base_url=f"{seeing.base_url}/v1", api_key="none", max_retries=0).responses.create(
        model=NAME, max_output_tokens=8, temperature=0, reasoning={"effort": "none"},
        input=[{
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What do you see?"},
                {"type": "input_image", "image_url": url(data), "detail": "auto"},
            ],
        }],
    )  # fmt: skip
    usage = other.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert one.usage.prompt_tokens == total == third.usage.input_tokens
    texts = [one.choices[0].message.content, "".join(part.text for part in other.content if part.type == "text")]
    assert texts[0] == texts[1] == third.output_text


def test_the_engine_gives_the_same_answer_without_http(folder: Path, seeing: Served) -> None:
    data = png(6)
    rendered = chat(seeing, data)
    tokenizer = Tokenizer.from_file(SHIPPED_MODEL)
    user = [*tokenizer.encode("<｜begin▁of▁sentence｜><｜User｜>What do you see?\n\n")]
    ids = [*user, IMAGE_ID, *tokenizer.encode("<｜Assistant｜></think>")]
    with LLM(folder, threads=1) as llm:
        (plain,) = llm.generate([ImagePrompt(ids, [data])], SamplingParams(max_tokens=8))
    assert plain.usage.prompt_tokens == rendered.usage.prompt_tokens
    assert plain.logprobs == pytest.approx(logprobs(rendered), abs=1e-6)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://example.org/a.png", "not fetched from addresses"),
        ("data:image/png;base64,bm8gaW1hZ2U=", "cannot be read"),
        ("data:image/png;base64,???", "[Ii]nvalid base64"),
    ],
)
def test_what_is_no_image_is_refused(seeing: Served, address: str, said: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": address}}]
    with pytest.raises(openai.BadRequestError, match=said):
        chat(seeing, messages=[{"role": "user", "content": content}])
