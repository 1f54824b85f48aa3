"""From patches and token types to the image positions of a prompt."""

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.vision import VisionTower
from headrace.vision.span import deduce_grid


def encode_images(model: DeepseekV41, patches: Tensor, token_types: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Run the image tower on all images of a prompt.

    Args:
        model: loaded with its image tower.
        patches: [n, 3, p, p] of all images one after the other.
        token_types: [N] integers, -1 for text, 0 start, 1 image, 2 newline, 3 end.

    Returns:
        [N] bool marks of image positions and their embeddings [marks, D] bfloat16.

    Raises:
        UserError: the model has no image tower, or patches and types do not fit each other or the model.
    """
    vision = model.config.vision
    if vision is None or not model.parameters.vision:
        raise UserError("the model has no image tower, so images are not accepted", param="images")
    width = 3 * vision.patch_size**2
    if not patches.is_floating_point() or patches.dim() < 2 or patches.shape[1:].numel() != width or not len(patches):
        raise UserError(
            f"patches have shape {list(patches.shape)} and dtype {patches.dtype}; floating-point "
            f"[n, 3, {vision.patch_size}, {vision.patch_size}] is accepted",
            param="images",
        )
    if not patches.float().isfinite().all():
        raise UserError("patches hold a number that is not finite", param="images")
    tower = VisionTower(vision, model.parameters.vision)
    cells, start = [], 0
    for grid in deduce_grid(patches.shape[0], token_types, vision.downsample):
        count = grid[0] * grid[1]
        cells.append(tower.encode(patches[start : start + count].to(model.device), grid))
        start += count
    is_image = token_types >= 0
    if not cells:
        raise UserError("token_types marks no image position; at least one image is needed", param="images")
    types = torch.from_numpy(token_types[is_image].astype(np.int64)).to(model.device)
    return is_image, tower.span(torch.cat(cells), types)
