"""From pixels to the patches that the vision tower reads."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from headrace.vision.preprocess import ImagePlan, ImageRules, fit_pixels


def to_patches(pixels: NDArray[np.uint8], patch_size: int) -> torch.Tensor:
    """Scale pixels and cut them.

    Args:
        pixels: [height, width, 3], both sides whole multiples of the patch size.
        patch_size: pixels along each side of a patch.

    Returns:
        [patches, 3, patch_size, patch_size] bfloat16 in -1..1, row-major over the patch grid.

    Numerics: float32 arithmetic on 8-bit values, one rounding to bfloat16.
    Source: specification 3.12.1.
    """
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    values = torch.from_numpy(pixels).to(torch.float32).div_(255).sub_(0.5).div_(0.5).to(torch.bfloat16)
    grid = values.view(rows, patch_size, columns, patch_size, 3)
    return grid.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, patch_size, patch_size)


def preprocess(image: Image.Image, rules: ImageRules) -> tuple[torch.Tensor, ImagePlan]:
    """Turn an image of any mode and size into patches, see `to_patches`.

    Raises:
        UserError: the image cannot be brought to an accepted size.
    """
    pixels, plan = fit_pixels(image, rules)
    return to_patches(pixels, rules.patch_size), plan
