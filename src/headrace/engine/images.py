"""Images in prompts, on the front's side: read, sized, and their tokens put where a placeholder stood."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.architecture import Config
from headrace.vision.preprocess import ImageRules, fit_pixels, read_image
from headrace.vision.span import span_types


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images.

    Attributes:
        token_ids: ids in which the model's image token stands once for every image, in order.
        images: the images' files as bytes (PNG, JPEG, ...).
    """

    token_ids: Sequence[int]
    images: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class PlacedImage:
    """One image of a prompt, sized for the model.

    Attributes:
        start: position of its first token.
        pixels: [height, width, 3] RGB.
        types: [n] what each of its tokens is, see `headrace.vision.span`.
    """

    start: int
    pixels: NDArray[np.uint8]
    types: NDArray[np.int64]

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.types)

    @property
    def digest(self) -> bytes:
        """What the prefix cache tells images apart by."""
        digest = hashlib.blake2b(repr(self.pixels.shape).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()


def place_images(prompt: ImagePrompt, config: Config) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Return the prompt's token ids with every image's tokens in them, and the images.

    Raises:
        UserError: the model takes no images, there are more or fewer placeholders than images, or one cannot be read.
    """
    token, rules = config.image_token_id, image_rules(config)
    if token is None or rules is None:
        raise UserError("this model has no image tower; accepted are prompts without images", param="images")
    ids = list(prompt.token_ids)
    places = [place for place, token_id in enumerate(ids) if token_id == token]
    if len(places) != len(prompt.images):
        raise UserError(
            f"{len(prompt.images)} images were given and the prompt has {len(places)} places for them; as many of each "
            "are accepted",
            param="images",
        )
    placed: list[PlacedImage] = []
    found: list[int] = []
    done = 0
    for place, data in zip(places, prompt.images, strict=True):
        pixels, plan = fit_pixels(read_image(data), rules)
        types = span_types(plan.cell_grid)
        found += ids[done:place]
        placed.append(PlacedImage(start=len(found), pixels=pixels, types=types))
        found += [token] * len(types)
        done = place + 1
    return found + ids[done:], tuple(placed)


def image_rules(config: Config) -> ImageRules | None:
    """Return how a model wants its images sized; None if it takes none."""
    vision = config.vision
    if vision is None:
        return None
    return ImageRules(
        patch_size=vision.patch_size,
        downsample=vision.downsample,
        max_image_tokens=vision.max_image_tokens,
        min_pixels=vision.min_pixels,
        max_wh_ratio=vision.max_wh_ratio,
    )
