"""Prompts with images through the engine, against the whole-sequence reference's recorded model and each other."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.core.errors import UserError
from headrace.engine.core.core import EngineCore
from headrace.engine.core.memory_plan import Measured, plan_memory
from headrace.engine.core.options import EngineOptions
from headrace.engine.images import ImagePrompt, image_rules, place_images
from headrace.engine.result import Result
from headrace.engine.submission import Submission
from headrace.engine.threads import Threads
from headrace.models.deepseek_v41.batch import ImageRows, Span
from headrace.models.deepseek_v41.images import encode_images
from headrace.vision.patches import preprocess
from tests.engine.core.serving import Client, params
from tests.traces import golden_model, synthetic

TEXT = list(range(20, 60))


def picture(seed: int, size: tuple[int, int] = (130, 90)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def prompt(*images: bytes, after: int = 30) -> ImagePrompt:
    token = golden_model().config.image_token_id
    ids = [0]
    for _ in images:
        ids += [*TEXT, token]
    return ImagePrompt([*ids, *(100 + place for place in range(after))], images)


def engine(**options: Any) -> EngineCore:
    model = golden_model()
    chosen = EngineOptions(
        **{"num_slots": 4, "cache_tokens": 4096, "chunk": 16, "snapshot_every": 64, "is_audited": True, **options}
    )
    plan = plan_memory(model.state_shape, chosen, 1024, Measured(process=0, weights=0, scratch=0))
    return EngineCore(model, None, chosen, plan, threads=Threads(1, 1), namespace={"weights": "golden"})


def submit(client: Client, name: str, given: ImagePrompt, **values: Any) -> None:
    ids, images = place_images(given, golden_model().config)
    client.core.submit(
        Submission(
            request_id=name,
            prompt_ids=np.array(ids, dtype=np.int64),
            params=params(**values),
            seed=1,
            submitted=0.0,
            images=images,
        )
    )


def answer(core: EngineCore, given: ImagePrompt, **values: Any) -> Result:
    client = Client(core)
    submit(client, "a", given, **values)
    client.finish()
    assert not client.errors
    return client.results["a"][0]


def plain(given: ImagePrompt, count: int) -> list[int]:
    """Return the greedy answer of the model alone: one prefill, all images through the tower as the trace does it."""
    model = golden_model()
    ids, images = place_images(given, model.config)
    rules = image_rules(model.config)
    patches = torch.cat([preprocess(Image.open(io.BytesIO(data)), rules)[0] for data in given.images])
    types = np.full(len(ids), -1)
    for image in images:
        types[image.start : image.stop] = image.types
    is_image, rows = encode_images(model, patches, types)
    state = model.new_state()
    state.reserve(len(ids) + count)
    tokens: list[int] = []
    span = Span(state, np.array(ids, dtype=np.int64), len(ids), images=ImageRows(is_image, rows))
    while len(tokens) < count:
        logits = model.forward([span]).logits[-1]
        tokens.append(int(logits.argmax()))
        span = Span(state, np.array(tokens[-1:], dtype=np.int64), 1)
    return tokens


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_an_image_is_read_as_the_model_alone_reads_it_whatever_the_chunks(chunk: int) -> None:
    given = prompt(picture(1))
    assert answer(engine(chunk=chunk), given, mode="full").token_ids == plain(given, 6)


def test_two_images_and_text_between_them() -> None:
    given = prompt(picture(1, (126, 84)), picture(2, (84, 126)))
    assert answer(engine(), given, mode="full").token_ids == plain(given, 6)


def test_the_answer_depends_on_what_the_image_shows() -> None:
    one, other = (answer(engine(), prompt(picture(seed), after=3), mode="full") for seed in (1, 2))
    assert one.logprobs != other.logprobs


@pytest.mark.parametrize("mode", ["full", "replay"])
def test_a_cached_image_prompt_answers_as_a_fresh_one(mode: str) -> None:
    core, given = engine(), prompt(picture(1), after=60)
    fresh = answer(engine(), given, mode=mode)
    first, second = answer(core, given, mode=mode), answer(core, given, mode=mode)
    assert first.token_ids == second.token_ids == fresh.token_ids
    assert first.logprobs == second.logprobs == fresh.logprobs
    assert first.usage.cached_tokens == 0
    assert (second.usage.cached_tokens > 0) == (mode == "replay")


def test_equal_tokens_with_another_picture_are_no_hit_behind_it() -> None:
    core = engine()
    answer(core, prompt(picture(1), after=60))
    other = answer(core, prompt(picture(2), after=60))
    assert other.usage.cached_tokens <= 1 + len(TEXT)
    assert other.token_ids == answer(engine(), prompt(picture(2), after=60)).token_ids


def test_an_image_among_other_requests_changes_nobody() -> None:
    client = Client(engine())
    given = prompt(picture(3), after=40)
    for name in "abc":
        submit(client, name, prompt(picture(ord(name)), after=5) if name != "b" else given)
        client.step(2)
    client.finish()
    assert client.results["b"][0].logprobs == answer(engine(), given).logprobs


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_places_as_images_are_needed(count: int) -> None:
    given = ImagePrompt(prompt(picture(1)).token_ids, [picture(1)] * count)
    with pytest.raises(UserError, match=f"{count} images were given and the prompt has 1 places"):
        place_images(given, golden_model().config)


def test_a_model_without_a_tower_refuses() -> None:
    with pytest.raises(UserError, match="no image tower"):
        place_images(ImagePrompt([1], []), synthetic("five streams, no draft").config)


def test_a_file_that_is_no_image_is_refused() -> None:
    given = ImagePrompt(prompt(picture(1)).token_ids, [b"no image"])
    with pytest.raises(UserError, match="cannot be read"):
        place_images(given, golden_model().config)
