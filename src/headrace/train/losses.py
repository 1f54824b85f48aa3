"""Cross-entropy of next tokens as numerator and denominator, without the logits of a whole batch in memory.

Add numerators and denominators over passes and divide once: a mean of means weighs the tokens of short passes more.
Source: training.md sections 2.1 and 2.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.core.errors import InternalError
from headrace.kernels.native.cross_entropy import judge_rows
from headrace.kernels.precision import wide_dtype, widen
from headrace.kernels.product import ROW_TILE, add_over_rows, linear_fp32, pad_columns, pad_rows, product
from headrace.train.data.packing import IGNORE

_LOGITS = 1 << 21  # logits computed at once: larger pieces go to memory in every pass over them
_SUM_WIDTH = 1024


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the labelled rows of a pass.

    `numerator` [] sum over them in nats, with gradient; `count` how many there are; `losses_T` [T] of every row, 0
    where nothing is asked, without gradient; `correct_T` [T] bool, whether the largest logit is the label's (the first
    one, if several are).
    """

    numerator: Tensor
    count: int
    losses_T: Tensor
    correct_T: Tensor


def cross_entropy(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor | None = None
) -> CrossEntropy:
    """Judge rows by their labels.

    Args:
        hidden_TD: [T, D] normalised final states, in the dtype of the activations.
        head_VD: [V, D] float32 (float64 in gradient checks).
        labels_T: [T] int64, `IGNORE` where nothing is asked. Labels are shifted inside each document, by its packing.
        weights_T: [T], factor of each row in the sum; None weighs all alike. `losses_T` are without it.

    Raises:
        InternalError: labels and rows differ in number, or a label is no token.

    Numerics: logits, sums and gradients in float32; logits are those of the serving path, and a row's loss and its
        gradient are the same bits in any batch. The gradient of the head is summed over pieces of the labelled rows in
        order; rows without a label are not multiplied with the head.
    State: none. Gradients are computed together with the loss, so that no logits are kept.
    """
    if labels_T.shape != hidden_TD.shape[:1]:
        raise InternalError(f"{list(labels_T.shape)} labels were given for {hidden_TD.shape[0]} rows")
    is_asked = labels_T != IGNORE
    asked = labels_T[is_asked]
    if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < head_VD.shape[0]:
        raise InternalError(f"labels {int(asked.min())} to {int(asked.max())} are not all below {head_VD.shape[0]}")
    if not torch.is_grad_enabled():
        hidden_TD, head_VD = hidden_TD.detach(), head_VD.detach()
    numerator, losses_T, correct_T = _CrossEntropy.apply(hidden_TD, head_VD, labels_T, weights_T)
    return CrossEntropy(numerator, int(is_asked.sum()), losses_T, correct_T)


def ordered_sum(values: Tensor) -> Tensor:
    """Return the sum of all values; the order of additions depends on their number only.

    The library's sum of everything is split between threads; here each of the partial sums belongs to one.
    """
    flat = values.reshape(-1)
    while flat.numel() > _SUM_WIDTH:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _SUM_WIDTH)).view(-1, _SUM_WIDTH).sum(1)
    return flat.sum()


class _CrossEntropy(torch.autograd.Function):
    """Sum of losses; the losses and the hits of every row come along without gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weights_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        padded, dtype = pad_columns(head_VD), wide_dtype(head_VD.dtype)
        losses_T = torch.zeros(labels_T.shape, dtype=dtype, device=labels_T.device)
        correct_T = torch.zeros_like(labels_T, dtype=torch.bool)
        of_hidden = torch.zeros_like(hidden_TD, dtype=dtype) if needs_hidden else None
        of_head = torch.zeros_like(head_VD, dtype=dtype) if needs_head else None
        step = max(ROW_TILE, _LOGITS // padded.shape[0] // ROW_TILE * ROW_TILE)
        for rows in (labels_T != IGNORE).nonzero().squeeze(1).split(step):
            labels = labels_T[rows]
            hidden = pad_rows(hidden_TD[rows])
            logits = linear_fp32(hidden, padded, head_VD.shape[0])
            weights = None if weights_T is None else weights_T[rows]
            has_gradient = needs_hidden or needs_head
            losses_T[rows], correct_T[rows] = _judge(logits, labels, weights, has_gradient=has_gradient)
            if of_hidden is not None:
                of_hidden[rows] = product(logits, widen(head_VD).t())[: labels.shape[0]]
            if of_head is not None:
                add_over_rows(logits, widen(hidden), of_head)
        ctx.save_for_backward(of_hidden, of_head)
        ctx.dtype = hidden_TD.dtype
        ctx.mark_non_differentiable(losses_T, correct_T)
        return ordered_sum(losses_T if weights_T is None else losses_T * weights_T), losses_T, correct_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_hidden, of_head = ctx.saved_tensors
        return (
            None if of_hidden is None else (of_hidden * gradient).to(ctx.dtype),
            None if of_head is None else of_head * gradient,
            None,
            None,
        )


def _judge(
    logits_RV: Tensor, labels_T: Tensor, weights_T: Tensor | None, *, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return losses and hits of the first T rows; the others are padding.

    With `has_gradient` logits become their gradient: softmax minus one at the label, times the row's weight, 0 in the
    rows that are padding.
    """
    count = labels_T.shape[0]
    rows = logits_RV[:count]
    if has_gradient:
        logits_RV[count:] = 0.0
    found = judge_rows(rows, labels_T, weights_T, has_gradient=has_gradient)
    if found is not None:
        return found
    sums = torch.logsumexp(rows, 1, keepdim=True)
    losses = (sums - rows.gather(1, labels_T.unsqueeze(1))).squeeze(1)
    correct = rows.argmax(1) == labels_T
    if has_gradient:
        rows.sub_(sums).exp_().scatter_add_(1, labels_T.unsqueeze(1), rows.new_full((count, 1), -1.0))
        if weights_T is not None:
            rows *= weights_T.unsqueeze(1)
    return losses, correct
