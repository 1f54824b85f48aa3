"""Images become files in the order of their places; what is too much, unreadable or somewhere else is refused."""

import base64
import io
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from PIL import Image

from headrace.core.errors import UserError
from headrace.engine.images import ImagePrompt, place_images
from headrace.models.deepseek_v41.config import load_config
from headrace.server.protocol.conversation import Protocol
from headrace.server.protocol.images import image_files, may_connect
from headrace.server.settings import ServerSettings
from tests.server.protocol.nano import TOKENIZER, chat, messages, responses, user

MINI = Path(__file__).parents[2] / "golden" / "deepseek_v41_mini"


def png(red: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), (red, 0, 0)).save(out, "PNG")
    return out.getvalue()


FIRST, SECOND = png(10), png(200)


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def sources(*urls: str) -> list[Any]:
    return [recipe.DataUrlImageSource(one, path=f"messages.0.content[{i}]") for i, one in enumerate(urls)]


def test_files_come_in_order_whatever_the_spelling() -> None:
    broken = url(FIRST)[:40] + "\n" + url(FIRST)[40:]
    percent = "data:image/png," + "".join(f"%{byte:02x}" for byte in SECOND)
    raw = recipe.BytesImageSource(b"bytes")
    found = image_files([*sources(broken, percent), raw], ServerSettings(), has_vision=True)
    assert found == [FIRST, SECOND, b"bytes"]
    assert image_files([], ServerSettings(), has_vision=False) == []


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        (sources("data:image/png;base64,@@"), {}, "is not base64"),
        (sources("data:image/png"), {}, "has no comma"),
        (sources(url(FIRST)) * 3, {"max_images": 2}, "3 images were given; accepted are 2 at most"),
        (sources(url(FIRST)), {"max_image_bytes": 10}, "bytes; accepted are 10 at most"),
        ([recipe.UrlImageSource("https://example.org/a.png")], {}, "not fetched from addresses"),
        ([recipe.UrlImageSource("http://127.0.0.1:9/a.png")], {"allow_image_urls": True}, "could not be fetched"),
        ([recipe.UrlImageSource("http://[::1]:9/a.png")], {"allow_image_urls": True}, "could not be fetched"),
    ],
)
def test_what_cannot_be_read_is_refused(given: list[Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        image_files(given, ServerSettings(**settings), has_vision=True)


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:0a00:0001::", False),
        ("nothing", False),
        ("1.1.1.1", True),
        ("2606:4700:4700::1111", True),
    ],
)
def test_only_public_addresses_are_connected_to(address: str, may: bool) -> None:
    assert may_connect("host", address) == may


def test_three_dialects_put_images_where_they_stand() -> None:
    config = load_config(MINI)
    seeing = Protocol(config, TOKENIZER, ServerSettings())  # the small checkpoint's own vocabulary has no conversations
    assert config.vision is not None
    source = {"type": "base64", "media_type": "image/png"}
    data = [base64.b64encode(one).decode() for one in (FIRST, SECOND)]
    turns = [
        chat(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": url(FIRST)}},
                            {"type": "text", "text": "or"},
                            {"type": "image_url", "image_url": {"url": url(SECOND)}},
                        ],
                    }
                ]
            },
            seeing,
        ),
        responses(
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": url(FIRST)},
                            {"type": "input_text", "text": "or"},
                            {"type": "input_image", "image_url": url(SECOND)},
                        ],
                    }
                ]
            },
            seeing,
        ),
        messages(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {**source, "data": data[0]}},
                            {"type": "text", "text": "or"},
                            {"type": "image", "source": {**source, "data": data[1]}},
                        ],
                    }
                ]
            },
            seeing,
        ),
    ]
    assert [turn.images for turn in turns] == [[FIRST, SECOND]] * 3
    assert turns[0].prompt_ids == turns[1].prompt_ids == turns[2].prompt_ids
    assert turns[0].prompt_ids.count(config.image_token_id) == 2
    ids, placed = place_images(ImagePrompt(turns[0].prompt_ids, turns[0].images), config)
    assert len(ids) > len(turns[0].prompt_ids) + 2
    assert [int(one.pixels[one.pixels.shape[0] // 2, one.pixels.shape[1] // 2, 0]) for one in placed] == [10, 200]


def test_a_model_without_eyes_says_so() -> None:
    part = {"type": "image_url", "image_url": {"url": url(FIRST)}}
    with pytest.raises(UserError, match="this model takes no images"):
        chat({"messages": [{"role": "user", "content": [part]}, user("hi")]})
