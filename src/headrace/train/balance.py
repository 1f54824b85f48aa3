"""Keep the experts of a layer equally busy: a bias that only selection sees, and a small loss per sequence.

The bias is moved by counts after an optimizer step that was not skipped; it has no gradient and no optimizer. V4.1
keeps two per layer, one for text and one for image tokens. Source: DeepSeek-V4 and V4.1-Flash reports on balance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import InternalError, UserError
from headrace.train.schedule import Staircase


@dataclass(frozen=True)
class Loads:
    """Tokens per expert of one layer over a global batch: `text_E` and `image_E` [E] int64."""

    text_E: Tensor
    image_E: Tensor

    @property
    def total(self) -> Tensor:
        """Tokens of both kinds per expert."""
        return self.text_E + self.image_E


def count_loads(
    experts_TK: Tensor, num_experts: int, *, is_image: Tensor | None = None, is_valid: Tensor | None = None
) -> Loads:
    """Count how many tokens every expert got.

    Args:
        experts_TK: [T, K] integer, experts as executed.
        num_experts: E.
        is_image: [T] bool, tokens selected with the image bias; None for none.
        is_valid: [T] bool, tokens that are not padding; None for all.

    Numerics: exact.
    State: none.
    """
    valid = torch.ones_like(experts_TK[:, 0], dtype=torch.bool) if is_valid is None else is_valid
    image = torch.zeros_like(valid) if is_image is None else is_image
    text_E, image_E = (
        torch.bincount(experts_TK[valid & kind].flatten().long(), minlength=num_experts) for kind in (~image, image)
    )
    return Loads(text_E, image_E)


class LoadCounter:
    """The loads of one global batch, per layer; each micro-batch is counted once, however often it is run.

    Invariant: a layer that activation checkpointing runs again must choose the same experts.
    State: loads since the last `take`.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._loads: dict[tuple[int, int], Loads] = {}

    def record(
        self,
        layer_id: int,
        micro_batch: int,
        experts_TK: Tensor,
        *,
        is_image: Tensor | None = None,
        is_valid: Tensor | None = None,
    ) -> None:
        """Count one layer of one micro-batch; a repetition with the same counts is ignored.

        Raises:
            InternalError: the same layer and micro-batch came before with other counts.
        """
        loads = count_loads(experts_TK.detach(), self._num_experts, is_image=is_image, is_valid=is_valid)
        before = self._loads.setdefault((layer_id, micro_batch), loads)
        if not (torch.equal(before.text_E, loads.text_E) and torch.equal(before.image_E, loads.image_E)):
            raise InternalError(f"Layer {layer_id} chose other experts when micro-batch {micro_batch} was run again.")

    def take(self) -> dict[int, Loads]:
        """Return the loads of every layer, summed over micro-batches, and start anew."""
        sums: dict[int, Loads] = {}
        for (layer_id, _), loads in sorted(self._loads.items()):
            sums[layer_id] = (
                Loads(sums[layer_id].text_E + loads.text_E, sums[layer_id].image_E + loads.image_E)
                if layer_id in sums
                else loads
            )
        self._loads = {}
        return sums


@torch.no_grad()
def update_bias(bias_E: Tensor, load_E: Tensor, speed: float) -> None:
    """Move a routing bias towards equal loads: b_i <- b_i + speed * sign(mean load - load_i).

    Args:
        bias_E: [E] float32, changed in place.
        load_E: [E] int64, tokens per expert of the kind this bias is for; all zeros leave it alone.
        speed: u, at least 0.

    Raises:
        UserError: the speed is below 0 or not a number.

    Numerics: the sign is exact; it compares the sum with E times the load in integers.
    State: `bias_E`.
    """
    if not speed >= 0.0:
        raise UserError(f"Bias speed is {speed}; a number of at least 0 is accepted.", param="speed")
    direction = torch.sign(load_E.sum() - load_E.numel() * load_E)
    bias_E.add_(direction.to(bias_E.dtype), alpha=speed)


def bias_speed(total_steps: int, *, speed: float = 1e-3, early: float = 1e-3, early_share: float = 0.1) -> Staircase:
    """Return u over steps: `early` for the first share of a run, then `speed`.

    The published value moves no selection in fewer than about 100 steps; for runs below 2,000 steps an early value of
    5e-3 to 1e-2 is a proposal of this project and no published setting.
    """
    border = int(total_steps * early_share)
    if early == speed or border == 0:
        return Staircase(starts=(0,), values=(speed,))
    return Staircase(starts=(0, border), values=(early, speed))


def max_violation(load_E: Tensor) -> float:
    """Return how far the busiest expert is above the mean, as a share of the mean; 0 without tokens."""
    mean = load_E.double().mean()
    return float(load_E.max() / mean - 1.0) if mean > 0 else 0.0


def sequence_balance(scores_TE: Tensor, experts_TK: Tensor, samples: Sequence[tuple[int, int]]) -> tuple[Tensor, int]:
    """Return the sequence-wise balance loss as a sum over samples, and their number.

    L = sum_i f_i P_i per sample of T tokens, with f_i = E / (K T) * times expert i was chosen, and P_i the mean over
    tokens of the expert's share of all scores. Equal loads or equal scores give 1.

    Args:
        scores_TE: [T, E] scores before any bias; the only input with a gradient.
        experts_TK: [T, K] integer, the chosen experts.
        samples: first and last + 1 token of every sample; tokens outside all samples are padding.

    Returns:
        The sum over samples of at least one token, and how many those are. Divide by the number of the whole batch.

    Numerics: in the dtype of the scores; f is exact counts and has no gradient. Sums over tokens run along contiguous
        rows, so neither value nor gradient depends on the number of threads.
    State: none.
    Source: DeepSeek-V3 report, complementary sequence-wise loss; V4 and V4.1 keep it.
    """
    num_experts, per_token = scores_TE.shape[1], experts_TK.shape[1]
    shares_ET = (scores_TE / scores_TE.sum(dim=1, keepdim=True)).t().contiguous()
    total = scores_TE.new_zeros(())
    count = 0
    for start, stop in samples:
        length = stop - start
        if length <= 0:
            continue
        chosen_E = torch.bincount(experts_TK[start:stop].flatten().long(), minlength=num_experts)
        f_E = chosen_E.to(scores_TE.dtype) * (num_experts / (per_token * length))
        p_E = shares_ET[:, start:stop].sum(dim=1) / length
        total = total + (f_E * p_E).sum()
        count += 1
    return total, count
