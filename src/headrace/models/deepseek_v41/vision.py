"""Image tower, aligner and the embeddings of an image span."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import Vision

START, IMAGE, NEWLINE, END = 0, 1, 2, 3
_EPS = 1e-6


class VisionTower:
    """Turns patches into embeddings. Holds the `vision.*`, `aligner.*` and `image_*` tensors by official name."""

    def __init__(self, config: Vision, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights

    @torch.inference_mode()
    def encode(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return one embedding per cell of `downsample` x `downsample` patches, row by row.

        Args:
            patches: [h * w, 3, p, p] or [h * w, 3 * p * p] bfloat16, row-major over the grid.
            grid: (h, w) in patches.

        Returns:
            [cells, D] bfloat16.

        Raises:
            UserError: the number of patches is not h * w.

        Numerics: bfloat16 after every operation, float32 norms; bidirectional attention inside the image.
        Source: spec sections 3.12.2 and 3.12.3.
        """
        height, width = grid
        if patches.shape[0] != height * width:
            raise UserError(f"{patches.shape[0]} patches do not fill a grid of {height} x {width}", param="images")
        x = self._linear(patches.flatten(1).to(self._weights["vision.norm.weight"].dtype), "vision.patch_embed.proj")
        cos, sin = self._rotation(height, width, x.device)
        for block in range(self._config.num_layers):
            prefix = f"vision.blocks.{block}"
            x = x + self._attention(self._norm(x, f"{prefix}.norm1"), f"{prefix}.attn", cos, sin)
            gate, up = self._linear(self._norm(x, f"{prefix}.norm2"), f"{prefix}.mlp.w1").chunk(2, -1)
            x = x + self._linear(functional.silu(gate) * up, f"{prefix}.mlp.w2")
        return self._align(self._norm(x, "vision.norm"), height, width)

    def span(self, cells: Tensor, types: Tensor) -> Tensor:
        """Return the embeddings [N, D] of the image positions of a prompt, in order.

        Args:
            cells: [cells, D] aligner rows of all images in reading order.
            types: [N] int64 types of those positions: 0 start, 1 image, 2 newline, 3 end.

        Raises:
            UserError: the number of image positions is not the number of cells.
        """
        is_cell = types == IMAGE
        if int(is_cell.sum()) != cells.shape[0]:
            raise UserError(
                f"token_types marks {int(is_cell.sum())} image positions, the patches give {cells.shape[0]}",
                param="images",
            )
        rows = cells.new_zeros((types.shape[0], cells.shape[1]))
        rows[is_cell] = cells
        for kind, name in ((START, "image_start"), (NEWLINE, "image_newline"), (END, "image_end")):
            rows[types == kind] = self._weights[name]
        return rows

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
        return (wide * factor * self._weights[f"{name}.weight"].float()).to(x.dtype)

    def _rotation(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin [h * w, 1, head_dim / 2]: the first half turns by row, the second by column."""
        half = self._config.hidden_size // self._config.num_heads // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / (self._config.rope_theta ** (steps / half))
        row = torch.arange(height, device=device).float().repeat_interleave(width)
        column = torch.arange(width, device=device).float().repeat(height)
        angles = torch.cat([torch.outer(row, frequencies), torch.outer(column, frequencies)], 1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def _attention(self, x: Tensor, prefix: str, cos: Tensor, sin: Tensor) -> Tensor:
        num_heads = self._config.num_heads
        q, k, v = self._linear(x, f"{prefix}.wqkv").view(x.shape[0], 3, num_heads, -1).unbind(1)
        q, k = _rotate_halves(q, cos, sin), _rotate_halves(k, cos, sin)
        out = functional.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return self._linear(out.transpose(0, 1).reshape(x.shape[0], -1), f"{prefix}.wo")

    def _align(self, x: Tensor, height: int, width: int) -> Tensor:
        """Gather cells channel-major and project them."""
        size = self._config.downsample
        image = x.view(height, width, -1).permute(2, 0, 1)
        image = functional.pad(image, (0, -width % size, 0, -height % size))
        channels = image.shape[0]
        cells = image.unflatten(1, (-1, size)).unflatten(3, (-1, size))  # [channels, rows, size, columns, size]
        cells = cells.permute(1, 3, 0, 2, 4).reshape(-1, channels * size * size)
        return self._linear(functional.gelu(self._linear(cells, "aligner.w1")), "aligner.w2")


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
