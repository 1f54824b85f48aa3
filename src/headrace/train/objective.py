"""The loss of one pass: numerators that add up over passes, each divided by what the whole batch has of its kind.

L = CE + alpha * balance + lambda * index. A mean of means would weigh a label by how few others share its pass.
Source: training.md section 2.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.plan import LayerPlan
from headrace.train.balance import sequence_balance
from headrace.train.data.packing import IGNORE, Ids
from headrace.train.graph import Document, GraphOutput
from headrace.train.index_loss import SourceLoss, first_eligible
from headrace.train.losses import CrossEntropy, cross_entropy
from headrace.train.passes import Pass, Passes


@dataclass
class IndexTally:
    """Sums of one index source: divergence in nats, rows, and the sums that `SourceLoss` names."""

    nats: float = 0.0
    rows: int = 0
    sums: dict[str, float] = field(default_factory=dict)


@dataclass
class Tally:
    """Sums over a batch as plain numbers.

    Attributes:
        nats, labels, hits: cross entropy, labelled rows and right guesses per kind of document.
        text_bytes, text_nats: bytes of the labels that stand for text, and their cross entropy.
        balance: sum over documents and layers, and documents.
        index: per index source its sum, rows, and the sums of shares that `SourceLoss` names.
    """

    nats: dict[str, float] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    text_nats: float = 0.0
    balance: tuple[float, int] = (0.0, 0)
    index: dict[int, IndexTally] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean cross entropy over all labels, in nats."""
        return sum(self.nats.values()) / max(1, sum(self.labels.values()))

    @property
    def loss_by_kind(self) -> dict[str, float]:
        """Mean cross entropy per kind of document."""
        return {kind: self.nats[kind] / self.labels[kind] for kind in self.nats}

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None where there is none."""
        return self.text_nats / float(np.log(2)) / self.text_bytes if self.text_bytes else None

    @property
    def balance_loss(self) -> float:
        """Balance loss per document, summed over layers."""
        return self.balance[0] / max(1, self.balance[1])

    @property
    def index_loss(self) -> float | None:
        """Index loss per query row, summed over index sources; None where there is none."""
        return sum(one.nats / max(1, one.rows) for one in self.index.values()) if self.index else None

    @property
    def index_shares(self) -> dict[str, float]:
        """Shares that `SourceLoss` names, of the worst index source each."""
        looked = [one for one in self.index.values() if one.rows]
        return {name: min(one.sums[name] / one.rows for one in looked) for name in looked[0].sums} if looked else {}

    def add_balance(self, summed: float, documents: int) -> None:
        """Add the balance loss of a pass."""
        self.balance = (self.balance[0] + summed, self.balance[1] + documents)

    def add_index(self, losses: Mapping[int, SourceLoss]) -> None:
        """Add the index losses of a pass."""
        for source, loss in losses.items():
            one = self.index.setdefault(source, IndexTally())
            one.nats += float(loss.numerator.detach())
            one.rows += loss.count
            for name, value in loss.sums.items():
                one.sums[name] = one.sums.get(name, 0.0) + value

    def count(self, judged: CrossEntropy, one: Pass, kind_names: Sequence[str], bytes_V: Ids | None) -> None:
        """Add what the labels of a pass cost."""
        losses, correct = judged.losses_T.double().numpy(), judged.correct_T.numpy()
        is_asked = one.labels != IGNORE
        for index, kind in enumerate(kind_names):
            chosen = is_asked & (one.kinds == index)
            if not chosen.any():
                continue
            nats = float(losses[chosen].sum())
            self.nats[kind] = self.nats.get(kind, 0.0) + nats
            self.labels[kind] = self.labels.get(kind, 0) + int(chosen.sum())
            self.hits[kind] = self.hits.get(kind, 0) + int(correct[chosen].sum())
            if kind == "text" and bytes_V is not None:
                self.text_bytes += int(bytes_V[one.labels[chosen]].sum())
                self.text_nats += nats


def judge(output: GraphOutput, one: Pass) -> CrossEntropy:
    """Return the cross entropy of a pass; where few rows are asked, logits are made for those only."""
    labels, weights = torch.from_numpy(one.labels), torch.from_numpy(one.weights)
    if 2 * one.num_labels > len(labels):
        return cross_entropy(output.hidden_TD, output.head, labels, weights)
    rows = torch.nonzero(labels != IGNORE).squeeze(1)
    some = cross_entropy(output.hidden_TD.index_select(0, rows), output.head, labels[rows], weights[rows])
    losses = torch.zeros(labels.shape, dtype=some.losses_T.dtype).index_copy_(0, rows, some.losses_T)
    correct = torch.zeros(labels.shape, dtype=torch.bool).index_copy_(0, rows, some.correct_T)
    return CrossEntropy(some.numerator, some.count, losses, correct)


def balance_of(output: GraphOutput, one: Pass) -> Tensor:
    """Return the balance loss of a pass, summed over documents and layers; a document is one sample in every layer."""
    whole = _edges([len(document.token_ids) for document in one.documents])
    run = _edges([_decoder_rows(document) for document in one.documents])
    total = torch.zeros(())
    for routes in output.routes:
        samples = whole if routes.scores_TE.shape[0] == whole[-1][1] else run
        total = total + sequence_balance(routes.scores_TE, routes.experts_TK, samples)[0]
    return total


def _decoder_rows(document: Document) -> int:
    if document.segments is None:
        return len(document.token_ids)
    return sum(segment.high - segment.low for segment in document.segments)


def _edges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def index_rows(passes: Passes, plan: Sequence[LayerPlan], config: Config, max_rows: int | None) -> dict[int, int]:
    """Return how many rows of a whole batch the index loss looks at, per index source.

    Known before any pass, so that every pass divides by it; `index_loss` draws exactly as many.
    """
    counts: dict[int, int] = {}
    for layer in plan[: config.num_layers]:
        if layer.index_source != layer.id:
            continue
        first = first_eligible(config, layer.ratio)
        per_pass = [
            sum(_rows_from(document, first, is_decoder=layer.id >= config.cut) for document in one.documents)
            for one in passes.passes
        ]
        counts[layer.id] = sum(rows if max_rows is None else min(rows, max_rows) for rows in per_pass)
    return counts


def _rows_from(document: Document, first: int, *, is_decoder: bool) -> int:
    """Count the rows of a document at positions from `first` on."""
    if document.segments is None or not is_decoder:
        return max(0, len(document.token_ids) - first)
    return sum(max(0, segment.high - max(first, segment.low)) for segment in document.segments)
