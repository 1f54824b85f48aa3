"""Turns an image file into pixels of the size that the vision tower takes.

The model knows no file formats and this module no weights and no torch; it only has to size and pad images as the model
was trained to see them. Read `vision/span.py` next: the tokens that stand for the image in a prompt.
"""

import io
import math
import os
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from headrace.core.errors import CheckpointError, UserError
from headrace.vision.span import cell_grid

_FILL = (127, 127, 127)


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """How a checkpoint wants its images sized.

    Attributes:
        patch_size: pixels along each side of a patch.
        downsample: patches along each side of a cell; a cell becomes one token.
        max_image_tokens: most tokens an image may take, its start, newline and end tokens included.
        min_pixels: smaller images are counted as if enlarged to this area.
        max_wh_ratio: widest accepted width / height; wider images are squeezed. None: no limit.
    """

    patch_size: int
    downsample: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check that the numbers can size an image at all.

        Raises:
            CheckpointError: one of them is out of range.
        """
        for name, least in (("patch_size", 1), ("downsample", 1), ("max_image_tokens", 4), ("min_pixels", 0)):
            if getattr(self, name) < least:
                raise CheckpointError(f"{name} is {getattr(self, name)}; accepted is {least} or more", param=name)
        if self.max_wh_ratio is not None and self.max_wh_ratio <= 0:
            raise CheckpointError(
                f"max_wh_ratio is {self.max_wh_ratio}; accepted is a number above 0, or none", param="max_wh_ratio"
            )

    @property
    def cell_size(self) -> int:
        """Pixels along each side of a cell."""
        return self.patch_size * self.downsample


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The size one image is brought to.

    Attributes:
        width: pixels.
        height: pixels.
        patch_grid: (rows, columns) of patches.
        cell_grid: (rows, columns) of cells, i.e. image tokens.
        num_tokens: tokens of the whole span, markers included.
    """

    width: int
    height: int
    patch_grid: tuple[int, int]
    cell_grid: tuple[int, int]
    num_tokens: int


def plan_image(width: int, height: int, rules: ImageRules) -> ImagePlan:
    """Choose the size an image is brought to: whole patches, at most the allowed tokens, the aspect roughly kept.

    With the released rules a 640 x 480 image becomes 644 x 490: 35 x 46 patches, 12 x 16 cells, 206 tokens.

    Args:
        width: pixels of the original.
        height: pixels of the original.
        rules: the checkpoint's rules.

    Raises:
        UserError: the image has no pixels.

    Source: specification 3.12.1, steps 1 to 3.
    """
    if width < 1 or height < 1:
        raise UserError(f"the image measures {width} x {height} pixels; accepted is at least 1 x 1", param="image")
    if rules.max_wh_ratio is not None:
        width = max(1, min(width, int(height * rules.max_wh_ratio)))
    if width * height < rules.min_pixels:
        ratio = math.sqrt(rules.min_pixels / (width * height))
        width, height = int(width * ratio), int(height * ratio)
    patch = rules.patch_size
    plan = _plan_of(_ceil_div(width, patch) * patch, _ceil_div(height, patch) * patch, rules)
    if plan.num_tokens <= rules.max_image_tokens:
        return plan
    return _plan_of(*_shrunk(width, height, rules), rules)


def _plan_of(width: int, height: int, rules: ImageRules) -> ImagePlan:
    patch_grid = (height // rules.patch_size, width // rules.patch_size)
    rows, columns = cell_grid(patch_grid, rules.downsample)
    return ImagePlan(
        width=width,
        height=height,
        patch_grid=patch_grid,
        cell_grid=(rows, columns),
        num_tokens=rows * (columns + 1) + 2,
    )


def _shrunk(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    """Return the (width, height) nearest the aspect that costs at most the allowed tokens."""
    cell, patch = rules.cell_size, rules.patch_size
    aspect = height / width
    # rows x (columns + 1) = budget with rows = aspect x columns, solved for columns
    budget = rules.max_image_tokens - 2
    columns = math.sqrt(budget / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, budget // 2 * cell
    if rows < 1:
        return (budget - 1) * cell, cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def read_image(source: str | os.PathLike[str] | bytes | BinaryIO) -> Image.Image:
    """Read an image file completely; of an animation, its first frame.

    Args:
        source: a path, the file's bytes, or an open binary file.

    Returns:
        An RGB image; transparency is dropped and orientation notes in the file are not followed.

    Raises:
        UserError: there is no such file, it is not an image, it is cut short, or it has too many pixels.
    """
    name = "the image" if isinstance(source, bytes) or hasattr(source, "read") else f"image {source}"
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist", param="image") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} is too large: {error}", param="image") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {error}", param="image") from error


def fit_image(image: Image.Image, plan: ImagePlan, rules: ImageRules) -> Image.Image:
    """Scale an image to the planned size, keeping its aspect and padding the rest with grey.

    Raises:
        UserError: one side would vanish.

    Source: specification 3.12.1, step 4.
    """
    image = image.convert("RGB")
    size = (plan.width, plan.height)
    if rules.max_wh_ratio is not None and image.width > image.height * rules.max_wh_ratio:
        return image.resize(size)
    if min(round(image.height / image.width * plan.width), round(image.width / image.height * plan.height)) < 1:
        raise UserError(
            f"the image measures {image.width} x {image.height} pixels; nothing would be left of its short side "
            f"at {plan.width} x {plan.height}",
            param="image",
        )
    return ImageOps.pad(image, size, color=_FILL)


def fit_pixels(image: Image.Image, rules: ImageRules) -> tuple[NDArray[np.uint8], ImagePlan]:
    """Bring an image to its planned size.

    Returns:
        ([height, width, 3] RGB, the plan).

    Raises:
        UserError: the image cannot be brought to an accepted size.
    """
    plan = plan_image(image.width, image.height, rules)
    return np.array(fit_image(image, plan, rules)), plan
