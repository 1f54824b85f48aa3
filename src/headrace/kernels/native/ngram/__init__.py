"""Gate that lets an n-gram memory value into the four streams, in place.

Numerics: float32; statistics and the dot product are lane sums as in `streams` (x * q_weight * k_weight rounded twice,
then a multiply-add with the key); gate = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)); stream plus gate times value in
one multiply-add, rounded once. Rows that are dead stay as they are.
Source: spec section 3.9.3.
"""

import ctypes

from torch import Tensor

from headrace.kernels.native.library import Library


class NgramGate:
    """Weights of one n-gram layer, float32 [4, D] each."""

    def __init__(self, library: Library, q_weight: Tensor, k_weight: Tensor, *, eps: float) -> None:
        self._kept = (q_weight, k_weight)
        self._eps = ctypes.c_double(eps)
        self._run = library.function("hr_ngram_gate", 8)

    def __call__(self, x_TMD: Tensor, kv: Tensor, is_dead_T: Tensor) -> None:
        """Add the gated value to contiguous streams [T, 4, D]; `kv` [T, 5 D] bfloat16, `is_dead_T` [T] bool."""
        weights = [part.data_ptr() for part in self._kept]
        rows, _, width = x_TMD.shape
        eps = ctypes.addressof(self._eps)
        self._run(x_TMD.data_ptr(), kv.data_ptr(), *weights, is_dead_T.data_ptr(), rows, width, eps)
