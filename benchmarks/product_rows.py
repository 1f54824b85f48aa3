"""What padding rows costs: a product of 1, 8 and 16 rows at small and at released widths, weights not in cache.

`headrace.kernels.product` pads every product to 8 rows so that a row's bits do not depend on how many are computed
together. The row of 1 is the library's own matrix-vector path, which the engine never takes. No bound.
"""

import argparse
from statistics import median

import torch

from ._measure import Figure, interleaved, parser, report

WIDTHS = ((512, 512), (2048, 512), (1280, 4096), (5120, 2304), (5120, 5120))
ROWS = (1, 8, 16)
COLD_BYTES = 96 << 20  # more than the last cache holds, split over copies of the matrix


def products(inputs: torch.Tensor, copies: list[torch.Tensor]) -> None:
    for weight in copies:
        torch.nn.functional.linear(inputs, weight)


def shape_figures(width: int, columns: int, dtype: torch.dtype, repetitions: int) -> list[Figure]:
    """Time one product for every number of rows, each over enough copies of the matrix to miss the cache."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(columns, width, generator=generator).to(dtype)
    copies = [weight.clone() for _ in range(max(2, COLD_BYTES // (weight.numel() * weight.element_size())))]
    inputs = {rows: torch.randn(rows, width, generator=generator).to(dtype) for rows in ROWS}
    for rows in ROWS:
        products(inputs[rows], copies[:2])
    variants = {f"{rows} row{'s' * (rows > 1)}": lambda rows=rows: products(inputs[rows], copies) for rows in ROWS}
    samples = interleaved(variants, repetitions, quiet=True)
    name = f"{str(dtype).removeprefix('torch.')} [{width} -> {columns}]"
    one_row = median([one.cpu_s for one in samples["1 row"]])
    return [
        Figure(
            f"{name}, {label}",
            "CPU-us",
            [one.cpu_s / len(copies) * 1e6 for one in taken],
            f"1 row: {median([one.cpu_s for one in taken]) / one_row:.2f} x",
            [one.cpu_s for one in taken],
            [one.wall_s for one in taken],
        )
        for label, taken in samples.items()
    ]


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    figures = [
        figure
        for dtype in (torch.bfloat16, torch.float32)
        for width, columns in WIDTHS
        for figure in shape_figures(width, columns, dtype, args.repetitions)
    ]
    return report("Cost of padding rows", args, figures, {})


if __name__ == "__main__":
    raise SystemExit(main(parser(__doc__).parse_args()))
