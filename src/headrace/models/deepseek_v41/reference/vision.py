"""Images: the tower over patches, the aligner to model width, and the span of embeddings in the sequence.

Attention in the tower is bidirectional within one image; in the text model an image is as causal as everything else.
From file to patches is `headrace.vision`, not this module.

Source: specification section 3.12; released `inference/vision.py`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.reference.arithmetic import linear, rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.deepseek_v41.config import Config, Vision
    from headrace.models.deepseek_v41.reference.arithmetic import Weights

VISION_EPS = 1e-6


class Span(IntEnum):
    """Type of a position: text, or its place in an image span."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


class Images(NamedTuple):
    """All images of one sequence.

    Attributes:
        types: [T] int64, a `Span` value for every position of the sequence.
        patches: one tensor per image, [rows x columns, 3, p, p] bfloat16, row-major over its patch grid.
        grids: (rows, columns) of each image's patch grid.
    """

    types: Tensor
    patches: tuple[Tensor, ...]
    grids: tuple[tuple[int, int], ...]


def images_from(types_T: Tensor, patches: Tensor, downsample: int) -> Images:
    """Split the patches of a trace file into images, finding each patch grid from the cells of its span.

    Args:
        types_T: [T] int64.
        patches: [all patches, 3, p, p] bfloat16, image after image.
        downsample: patches per cell side.

    Raises:
        UserError: no patch grids, or several different ones, fit the spans and the number of patches.
    """
    cells = []
    for start in (types_T == Span.START).nonzero().flatten().tolist():
        end = start + int((types_T[start:] == Span.END).nonzero()[0])
        rows = int((types_T[start:end] == Span.NEWLINE).sum())
        cells.append((rows, int((types_T[start:end] == Span.IMAGE).sum()) // rows))

    def sides(count: int) -> range:
        """Return the patch counts that fill this many cells, the last one at least partly."""
        return range((count - 1) * downsample + 1, count * downsample + 1)

    options = product(*(list(product(sides(rows), sides(columns))) for rows, columns in cells))
    fitting = [grids for grids in options if sum(h * w for h, w in grids) == patches.shape[0]]
    if len(fitting) != 1:
        message = (
            f"token_types has {len(cells)} image(s) of {cells} cells, which {len(fitting)} choices of patch grids fit "
            f"with {patches.shape[0]} patches; exactly one must."
        )
        raise UserError(message, "images")
    grids = fitting[0]
    return Images(types_T, patches.split([h * w for h, w in grids]), grids)


def rotate_2d(x_SQH: Tensor, grid: tuple[int, int], theta: float) -> Tensor:
    """Rotate query or key heads by patch row and column.

    Args:
        x_SQH: [S, Q, H] bfloat16, S = rows x columns, row-major.
        grid: (rows, columns).
        theta: base of the H / 4 frequencies.

    Returns:
        [S, Q, H] bfloat16. Element i < H/2 turns with element i + H/2; the first H/4 pairs by the row, the others by
        the column. Angles and products in float32, one rounding.
    """
    half = x_SQH.shape[-1] // 2
    freqs = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    place = torch.stack((row.flatten(), column.flatten()), dim=-1).float()
    angles = (place[..., None] * freqs).flatten(1)[:, None].to(x_SQH.device)
    cos, sin = angles.cos(), angles.sin()
    first, second = x_SQH[..., :half].float(), x_SQH[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()


def tower(weights: Weights, vision: Vision, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Run the image tower over one image.

    Args:
        weights: official names to tensors.
        vision: the tower's settings.
        patches: [S, 3, p, p] bfloat16, row-major over the grid.
        grid: (rows, columns), rows x columns = S.

    Returns:
        [S, hidden] bfloat16.

    Numerics: every operation rounds to bfloat16; norms and softmax run in float32; eps 1e-6.
    """
    x = linear(weights, "vision.patch_embed.proj", patches.flatten(1))
    for i in range(vision.num_layers):
        block = f"vision.blocks.{i}"
        u = rms_norm(x, weights[f"{block}.norm1.weight"], VISION_EPS)
        x = x + _self_attention(weights, f"{block}.attn", vision, u, grid)
        u = rms_norm(x, weights[f"{block}.norm2.weight"], VISION_EPS)
        gate, up = linear(weights, f"{block}.mlp.w1", u).chunk(2, dim=-1)
        x = x + linear(weights, f"{block}.mlp.w2", functional.silu(gate) * up)
    return rms_norm(x, weights["vision.norm.weight"], VISION_EPS)


def _self_attention(weights: Weights, prefix: str, vision: Vision, u: Tensor, grid: tuple[int, int]) -> Tensor:
    """Attend from every patch to every patch of the image: [S, hidden] bfloat16."""
    q, k, v = linear(weights, f"{prefix}.wqkv", u).unflatten(-1, (3, vision.num_heads, -1)).unbind(1)
    q, k = rotate_2d(q, grid, vision.rope_theta), rotate_2d(k, grid, vision.rope_theta)
    scores = torch.einsum("sqh,tqh->qst", q.float(), k.float()) * q.shape[-1] ** -0.5
    mixed = torch.einsum("qst,tqh->sqh", scores.softmax(dim=-1), v.float()).bfloat16()
    return linear(weights, f"{prefix}.wo", mixed.flatten(1))


def align(weights: Weights, features: Tensor, grid: tuple[int, int], downsample: int) -> Tensor:
    """Join cells of neighbouring patches and project them to model width.

    Args:
        weights: official names to tensors.
        features: [rows x columns, hidden] bfloat16.
        grid: (rows, columns).
        downsample: patches per cell side; missing patches at the bottom and right are zero.

    Returns:
        [cells, D] bfloat16, row-major. A cell's vector is channel-major: channel, then row, then column.
    """
    image = features.T.unflatten(1, grid)
    padded = functional.pad(image, (0, -grid[1] % downsample, 0, -grid[0] % downsample))
    cells = padded.unfold(1, downsample, downsample).unfold(2, downsample, downsample)
    flat = cells.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    return linear(weights, "aligner.w2", functional.gelu(linear(weights, "aligner.w1", flat)))


def overlay(weights: Weights, config: Config, h_TD: Tensor, images: Images) -> Tensor:
    """Replace the embeddings of image spans: start, one vector per cell, a newline after every row of cells, end.

    Args:
        weights: official names to tensors.
        config: the model.
        h_TD: [T, D] bfloat16 token embeddings.
        images: the images and the type of every position.

    Returns:
        [T, D] bfloat16.

    Raises:
        UserError: the model has no image tower, or cells and IMAGE positions differ in number.
    """
    if config.vision is None:
        message = "the model has no image tower (vision layers 0), so it takes no images."
        raise UserError(message, "images")
    vectors = [
        align(weights, tower(weights, config.vision, patches, grid), grid, config.vision.downsample)
        for patches, grid in zip(images.patches, images.grids, strict=True)
    ]
    cells = torch.cat(vectors) if vectors else h_TD[:0]
    places = images.types == Span.IMAGE
    if int(places.sum()) != cells.shape[0]:
        message = f"the images have {cells.shape[0]} cells, but {int(places.sum())} positions are of type IMAGE."
        raise UserError(message, "images")
    h_TD = h_TD.clone()
    h_TD[places] = cells
    for kind, name in ((Span.START, "image_start"), (Span.NEWLINE, "image_newline"), (Span.END, "image_end")):
        h_TD[images.types == kind] = weights[name]
    return h_TD
