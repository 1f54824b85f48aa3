"""Native kernels at released sizes, one row each: against reading memory, and the index over a million keys.

Matrices are many, so that none is in cache when its turn comes, and lie in an arena as a model's do. A plain read of
the same bytes is measured in turn.
"""

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.native.arena import Arena
from headrace.kernels.native.attention import Attention
from headrace.kernels.native.index import Index, Shape
from headrace.kernels.native.library import Library, load
from headrace.kernels.native.product import Product
from headrace.kernels.native.rows import Finished
from headrace.kernels.native.streams import Streams
from headrace.kernels.native.tiles import Matrix, tile_fp4, tile_fp8
from headrace.kernels.rope import plain_frequencies, rotation

from ._measure import Figure, Sample, interleaved, memory, parser, report, timed

KEYS = 1 << 20
MATRICES = 40
READ_SHARE = 0.6
INDEX_MS = 60.0
INDEX_MEMORY = 64 << 20


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def matrix(rows: int, width: int, arena: Arena, *, is_fp4: bool) -> Matrix:
    if is_fp4:
        return tile_fp4(random_bytes(rows, width // 2), torch.full((rows, width // 32), 120, dtype=torch.uint8), arena)
    codes = random_bytes(rows, width).clamp_max(0x7E)
    return tile_fp8(codes, torch.full((rows // 32, width // 32), 120, dtype=torch.uint8), arena)


def products(library: Library, name: str, rows: int, width: int, repetitions: int) -> list[Figure]:
    """Single rows through many matrices against a plain read of the same bytes."""
    arena = Arena()
    matrices = [matrix(rows, width, arena, is_fp4=name == "FP4") for _ in range(MATRICES)]
    runs = [Product(library, one, is_quantised=True) for one in matrices]
    flat = [one.tiles.view(-1).view(torch.int64) for one in matrices]
    x = torch.randn(1, width).bfloat16()
    size = sum(one.nbytes for one in matrices)
    found = interleaved(
        {"product": lambda: [run(x) for run in runs], "read": lambda: [part.sum() for part in flat]}, repetitions
    )
    speeds = {kind: [size / one.cpu_s / 1e9 for one in samples] for kind, samples in found.items()}
    share = [a / b for a, b in zip(speeds["product"], speeds["read"], strict=True)]
    title = f"{name} [{rows}, {width}], one row"
    return [
        Figure(title, "GB/s", speeds["product"], "plain read, next row", *seconds(found["product"])),
        Figure(f"plain read, {name}", "GB/s", speeds["read"], title, *seconds(found["read"])),
        Figure(f"share of a read, {name}", "1", share, "plain read", bound=READ_SHARE, is_floor=True),
    ]


def seconds(samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [one.cpu_s for one in samples], [one.wall_s for one in samples]


def index(library: Library, repetitions: int) -> list[Figure]:
    """A query of 32 heads over a million FP4 keys: top-512 and block maxima."""
    codes, scales = random_bytes(KEYS, 64), torch.randint(120, 130, (KEYS, 4), dtype=torch.uint8)
    shape = Shape(32, 128, 64, 1, 512, 2048, 8, writes_pool=True)
    picks, pool = (torch.zeros((1, count), dtype=torch.int64) for count in (512, 2048))
    turn = rotation(torch.tensor([KEYS - 1]), plain_frequencies(64, 1e4))
    place = [0, 1, KEYS - 1, codes.data_ptr(), scales.data_ptr(), 0, 1, picks.data_ptr(), pool.data_ptr()]
    table, run = np.array([place]), Index(library, shape)
    q, weights = torch.randn(1, 32 * 128).bfloat16(), torch.rand(1, 32).bfloat16()
    before = memory("VmHWM")
    samples = [timed(lambda: run((q.clone(), weights, *turn), table)) for _ in range(2 * repetitions + 1)]
    grown = memory("VmHWM") - before
    cpu, wall = seconds(samples)
    against = f"{KEYS:,} keys, 32 heads"
    return [
        Figure("index, top-512 and pool", "CPU-ms", [1e3 * one for one in cpu], against, cpu, wall, bound=INDEX_MS),
        Figure("index, memory beyond the keys", "bytes", [float(grown)], against, bound=INDEX_MEMORY),
    ]


def small(library: Library, repetitions: int) -> list[Figure]:
    """A half's hyper-connections at width 5120, and attention of 64 heads over 128 + 512 entries."""
    weights = torch.randn(24, 4 * 5120) * 0.01, torch.randn(24), torch.rand(3), torch.rand(5120)
    streams = Streams(library, *weights, iterations=20, norm_eps=1e-20, eps=1e-6)
    x, pre = torch.randn(1, 4, 5120).bfloat16(), torch.rand(1, 4)
    attention = Attention(library, torch.randn(64), width=512, rotated=64, window=128, scale=512**-0.5)
    ring, ring_scales = random_bytes(256, 512).clamp_max(0x77), torch.full((256, 16), 120, dtype=torch.uint8)
    entries, picks = torch.randn(512, 512).bfloat16(), torch.arange(512).view(1, -1)
    new = Finished(torch.zeros(1, 0), torch.randn(1, 512).bfloat16(), ring[:1].clone(), ring_scales[:1].clone())
    place = [0, 1, 1000, 0, ring.data_ptr(), ring_scales.data_ptr(), 256, picks.data_ptr(), 512, entries.data_ptr(), 0]
    table, turn = np.array([place]), rotation(torch.tensor([1000]), plain_frequencies(64, 1e4))
    q = torch.randn(1, 64 * 512).bfloat16()
    variants = {
        "hyper-connections of a half, width 5120": lambda: [streams.open(x, pre) for _ in range(50)],
        "attention, 64 heads, 640 entries": lambda: [attention(q.clone(), turn, new, table) for _ in range(50)],
    }
    found = interleaved(variants, 2 * repetitions + 1, quiet=True)
    return [
        Figure(name, "CPU-us", [2e4 * one.cpu_s for one in samples], "one row, in cache", *seconds(samples))
        for name, samples in found.items()
    ]


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    library, count = load(), args.repetitions
    library.use_threads(args.threads)
    figures = [
        *products(library, "FP4", 5120, 2304, count),
        *products(library, "FP8", 2304, 5120, count),
        *index(library, count),
        *small(library, count),
    ]
    return report("Native kernels", args, figures, {"instruction set": library.instruction_set})


if __name__ == "__main__":
    raise SystemExit(main())
