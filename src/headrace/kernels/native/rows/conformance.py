"""Cases of window rows: rotations of every width, no latent, zero, huge and missing numbers."""

from torch import Tensor

from headrace.kernels.native.conformance import Case
from headrace.kernels.native.library import Library
from headrace.kernels.native.rows import Finished, WindowRows, reference
from headrace.kernels.native.samples import Samples

_SIZES = ((9, 32, 64, 16), (1, 96, 32, 32), (65, 16, 96, 2), (3, 0, 64, 16), (130, 1536, 512, 64))


def cases() -> list[Case]:
    """Return the cases."""
    return [_case(Samples(10 + place), *sizes) for place, sizes in enumerate(_SIZES)]


def _case(samples: Samples, count: int, latent: int, width: int, rotated: int) -> Case:
    y, norms = samples.rows(count, latent + width, 30), (samples.positive(latent), samples.positive(width))
    if count > 8:
        y[6, latent + 3] = float("nan")
    turn = samples.turn(7, count, rotated)

    def run(library: Library) -> list[Tensor]:
        return _parts(WindowRows(library, *norms, rotated=rotated, eps=1e-20)(y, *turn))

    return Case(f"{count} rows {latent} + {width}", run, lambda: _parts(reference.finish(y, *norms, turn, 1e-20)))


def _parts(found: Finished) -> list[Tensor]:
    return [found.latent_TR, found.values_TH, found.codes_TH, found.scales_TG]
