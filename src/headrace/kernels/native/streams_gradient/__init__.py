"""Hyper-connections of four float32 streams in training: forward in PyTorch's order, gradients in one pass over a row.

`sinkhorn`, `expand` and `collapse` give the bits of `stream_mix.py`, which stays their reference: products and sums
round apart, one term after the other. Gradients have an order of their own that rows and threads do not change.

Numerics: float32. Gradients use multiply-adds that round once. Sums over D: lane j of 16 sums values 16 i + j in
ascending i, lanes are added as a tree (8, 4, 2, 1 apart). Sums over streams and over the 24 columns of the
coefficients' product are in ascending order.
What bounds it: reading and writing the streams once.
Source: spec sections 3.1 and 3.2.
"""

import ctypes
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from headrace.kernels.native.library import Library, best_library

STREAMS: Final = 4
COLUMNS: Final = STREAMS * (2 + STREAMS)
_LANES = 16


class StreamGradients:
    """The kernels. All tensors are contiguous float32 on the CPU."""

    def __init__(self, library: Library) -> None:
        self._use_threads = library.use_threads
        self._functions = {
            name: library.function(f"hr_train_{name}", count)
            for name, count in (
                ("sinkhorn", 5),
                ("sinkhorn_back", 5),
                ("expand", 7),
                ("expand_back", 11),
                ("collapse", 5),
                ("open_back", 11),
            )
        }

    def _run(self, name: str, *arguments: Tensor | int) -> None:
        self._use_threads(torch.get_num_threads())
        function: Any = self._functions[name]
        function(*[one.data_ptr() if isinstance(one, Tensor) else one for one in arguments])

    def sinkhorn(self, a_MMT: Tensor, steps: int, eps: float) -> tuple[Tensor, Tensor]:
        """Divide [4, 4, T] by sums over the first and the second dimension in turn.

        Returns:
            The matrices [T, 4, 4], and what was divided by, [steps, 4, T'], T' a multiple of 16.
        """
        rows = a_MMT.shape[2]
        a = torch.nn.functional.pad(a_MMT, (0, -rows % _LANES), value=1.0).contiguous()
        divisors = a.new_empty((steps, STREAMS, a.shape[2]))
        number = ctypes.c_double(eps)
        self._run("sinkhorn", a, divisors, a.shape[2], steps, ctypes.addressof(number))
        return a[:, :, :rows].permute(2, 0, 1).contiguous(), divisors

    def sinkhorn_gradient(self, of_comb: Tensor, comb: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `sinkhorn` was given, [4, 4, T], and its gradient, from result and its gradient [T, 4, 4]."""
        rows, padded = comb.shape[0], divisors.shape[2]
        g, a = (
            torch.nn.functional.pad(one.permute(1, 2, 0), (0, padded - rows), value=1.0).contiguous()
            for one in (of_comb, comb)
        )
        self._run("sinkhorn_back", g, a, divisors, padded, divisors.shape[0])
        return a[:, :, :rows], g[:, :, :rows]

    def expand(self, out_TD: Tensor, x_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor) -> Tensor:
        """Return the new streams [T, 4, D]."""
        streams = torch.empty_like(x_TMD)
        self._run("expand", out_TD, x_TMD, post_TM, comb_TMM, streams, out_TD.shape[0], out_TD.shape[1])
        return streams

    def expand_gradient(
        self, gradient_TMD: Tensor, out_TD: Tensor, x_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return gradients of the half's output, the streams, `post` and `comb`."""
        found = tuple(torch.empty_like(one) for one in (out_TD, x_TMD, post_TM, comb_TMM))
        rows, width = out_TD.shape
        self._run("expand_back", gradient_TMD, out_TD, x_TMD, post_TM, comb_TMM, *found, rows, width)
        return found[0], found[1], found[2], found[3]

    def collapse(self, x_TMD: Tensor, pre_TM: Tensor) -> Tensor:
        """Return the weighted sum of the streams, [T, D]."""
        rows, _, width = x_TMD.shape
        out = x_TMD.new_empty((rows, width))
        self._run("collapse", x_TMD, pre_TM, out, rows, width)
        return out

    def open_gradient(
        self,
        of_streams_TMD: Tensor,
        of_collapsed_TD: Tensor,
        x_TMD: Tensor,
        pre_TM: Tensor,
        of_product_TC: Tensor,
        share_T: Tensor,
        fn_CE: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of streams [T, 4, D] and pre-mix [T, 4].

        Args:
            of_streams_TMD: what comes back from where the streams go on; not changed.
            of_collapsed_TD: [T, D].
            x_TMD: [T, 4, D] the streams.
            pre_TM: [T, 4].
            of_product_TC: [T, 24] of the product with `fn`.
            share_T: [T], what the gradient of a token's values has of the values themselves.
            fn_CE: [>= 24, 4 D].
        """
        rows, _, width = x_TMD.shape
        of_x, of_pre = torch.empty_like(x_TMD), torch.empty_like(pre_TM)
        given = (x_TMD, pre_TM, of_collapsed_TD, share_T, of_product_TC, fn_CE)
        self._run("open_back", of_streams_TMD, of_x, *given, of_pre, rows, width)
        return of_x, of_pre


def stream_gradients(x_TMD: Tensor) -> StreamGradients | None:
    """Return the kernels if they are there and take such streams."""
    fits = x_TMD.dtype == torch.float32 and x_TMD.device.type == "cpu" and x_TMD.is_contiguous()
    if not fits or x_TMD.shape[1] != STREAMS or x_TMD.shape[2] % _LANES:
        return None
    return native_gradients()


@cache
def native_gradients() -> StreamGradients | None:
    """Return the kernels if they are there."""
    library = best_library()
    return None if library is None else StreamGradients(library)
