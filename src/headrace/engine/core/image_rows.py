"""Images in prompts, on the engine's side: embeddings made when a step first needs them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.engine.images import PlacedImage
from headrace.models.deepseek_v41.batch import ImageRows
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.vision import VisionTower
from headrace.vision.patches import to_patches


class PromptImages:
    """The images of one prompt. Owns their embeddings, from the first chunk that has one of their tokens in it."""

    def __init__(self, images: Sequence[PlacedImage]) -> None:
        self._images = tuple(images)
        self._rows: dict[int, Tensor] = {}

    @property
    def marks(self) -> Mapping[int, bytes]:
        """What tells prompts of equal tokens apart: each image's content at its first token."""
        return {image.start: image.digest for image in self._images}

    def is_image(self, start: int, stop: int) -> np.ndarray | None:
        """Return [stop - start] marks of image tokens; None if there are none."""
        marks = np.zeros(stop - start, dtype=bool)
        for image in self._images:
            marks[max(0, image.start - start) : max(0, image.stop - start)] = True
        return marks if marks.any() else None

    def part(self, model: DeepseekV41, start: int, stop: int) -> ImageRows | None:
        """Return the image tokens among positions `start` .. `stop` - 1 with their embeddings, None without any.

        State: embeddings are kept until a later chunk has left their image behind.
        """
        marks = self.is_image(start, stop)
        for place in [place for place in self._rows if self._images[place].stop <= start]:
            del self._rows[place]
        if marks is None:
            return None
        parts = []
        for place, image in enumerate(self._images):
            low, high = max(start, image.start), min(stop, image.stop)
            if low < high:
                parts.append(self._embeddings(model, place)[low - image.start : high - image.start])
        return ImageRows(marks, torch.cat(parts))

    def _embeddings(self, model: DeepseekV41, place: int) -> Tensor:
        if place not in self._rows:
            self._rows[place] = embed_image(model, self._images[place])
        return self._rows[place]


def embed_image(model: DeepseekV41, image: PlacedImage) -> Tensor:
    """Run the image tower on one image; returns [n, D] bfloat16, one row for each of its tokens.

    Numerics: an image's rows do not depend on other images or on where it stands.
    """
    config = model.config.vision
    if config is None or not model.parameters.vision:
        raise InternalError("a request with images reached a model that was loaded without its image tower")
    grid = (image.pixels.shape[0] // config.patch_size, image.pixels.shape[1] // config.patch_size)
    patches = to_patches(image.pixels, config.patch_size).to(model.device)
    tower = VisionTower(config, model.parameters.vision)
    return tower.span(tower.encode(patches, grid), torch.from_numpy(image.types).to(model.device))
