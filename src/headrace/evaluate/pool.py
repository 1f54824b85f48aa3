"""What the candidate pool costs the reindex layers behind it, against a scan of everything they may see.

Served rows (the last window of a document and one more behind it, in replay mode) of text and of pair rows. Recall is
the share of a layer's unrestricted top-k that the pool holds; mass is the share of the attention that the layers served
by it would pay to all global entries. Attention is diffuse, so mass is the honest one (training.md section 11.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.evaluate.estimate import Comparison, Control, Estimate, compare, mean, must_differ
from headrace.evaluate.held_out import HeldOut
from headrace.evaluate.prompts import PAIRS, pair_prompts, usable_lengths
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import Subject
from headrace.train.data.packing import Ids
from headrace.train.graph import Document, GraphOutput, Segment, TrainGraph
from headrace.train.index_loss import IndexLossSettings, first_eligible, index_loss

_MAX_ROWS = 64  # rows per index source and document


@dataclass(frozen=True)
class PoolCell:
    """One reindex layer on one kind of text at one length.

    `share` is the part of the visible entries that the pool holds, and so the recall of a random pool; `picked_mass`
    is the attention mass of what the layer picks in the end.
    """

    layer: int
    kind: str
    tokens: int
    share: float
    recall: float | None
    recall_stderr: float | None
    mass: float | None
    mass_stderr: float | None
    picked_mass: float | None
    documents: int


@dataclass(frozen=True, eq=False)
class PoolReport:
    """Cells, and over all of them the recall with the control: blocks drawn at random."""

    cells: list[PoolCell]
    recall: Estimate
    random_recall: Estimate
    comparisons: list[Comparison]
    controls: list[Control]


@dataclass(frozen=True)
class _Seen:
    """Shares of one document and layer, with the pool and with random blocks."""

    recall: float
    mass: float
    picked: float
    random_recall: float


def judge_pool(
    subject: Subject, held_out: HeldOut, settings: Settings, progress: Callable[[str], object]
) -> PoolReport | None:
    """Compare pool and full scan; None where no layer is restricted, or no length fills the pool."""
    config, graph = subject.config, subject.graph()
    layers = restricted_layers(graph)
    pool_entries = config.candidate_blocks * config.candidate_block_size
    ratio = graph.plan[config.candidate_source].ratio if config.candidate_source is not None else 1
    least = max(ratio * pool_entries, first_eligible(config, ratio))
    lengths = [length for length in usable_lengths(config, settings) if length - 2 * config.window > least]
    cells, seen = [], []
    for length in lengths if layers else ():
        for kind, rows in _documents(subject, held_out, settings, length).items():
            progress(f"candidate pool: {kind}, {length} tokens")
            found = [_look(subject, graph, ids, layers, settings.seed) for ids in rows]
            cells += [_cell(layer, kind, length, pool_entries * ratio / length, found) for layer in layers]
            seen += found
    if not seen:
        return None
    kept = [mean([one.recall for one in found.values()]).value or 0.0 for found in seen]
    drawn = [mean([one.random_recall for one in found.values()]).value or 0.0 for found in seen]
    apart = compare("pool.recall: random blocks minus pool", "recall", drawn, kept, [1.0] * len(seen))
    return PoolReport(cells, mean(kept), mean(drawn), [apart], [must_differ(apart, "lower")])


def restricted_layers(graph: TrainGraph) -> list[int]:
    """Return the layers that score nothing but the pool."""
    source = graph.config.candidate_source
    plans = graph.plan[: graph.config.num_layers]
    return [plan.id for plan in plans if plan.role == "reindex" and source is not None and plan.id > source]


def _documents(subject: Subject, held_out: HeldOut, settings: Settings, length: int) -> dict[str, list[Ids]]:
    """Return stretches of text, documents joined, and rows of pairs."""
    tokens = held_out.text.token_ids.astype(np.int64)
    count = settings.pool_rows
    starts = [place * len(tokens) // count for place in range(count)]
    text = [np.take(tokens, np.arange(start, start + length), mode="wrap") for start in starts]
    pairs = pair_prompts(subject.config, subject.encoder, held_out, settings, length, count)
    return {"text": text, PAIRS: [prompt.trial.token_ids for prompt in pairs]}


@torch.no_grad()
def _look(subject: Subject, graph: TrainGraph, ids: Ids, layers: Sequence[int], seed: int) -> dict[int, _Seen]:
    start = len(ids) - 2 * subject.config.window
    options = subject.options(has_records=True)
    output = graph.forward([Document(ids, (Segment(start, len(ids), start),))], options)
    settings = IndexLossSettings(max_rows=_MAX_ROWS)
    pool = index_loss(graph, output, options, settings, (seed,))
    drawn = index_loss(graph, _with_random_pool(output, graph, seed), options, settings, (seed,))
    found = {}
    for layer in layers:
        sums, count = pool[layer].sums, max(1, pool[layer].count)
        random_recall = drawn[layer].sums["recall"] / count
        found[layer] = _Seen(sums["recall"] / count, sums["pool"] / count, sums["kept"] / count, random_recall)
    return found


def _with_random_pool(output: GraphOutput, graph: TrainGraph, seed: int) -> GraphOutput:
    """Return the same pass with as many blocks per row, drawn from all visible ones."""
    generator = torch.Generator().manual_seed(seed)
    source, size = graph.config.candidate_source, graph.config.candidate_block_size
    ratio = graph.plan[0 if source is None else source].ratio
    pools = []
    for blocks, segment in zip(output.pools, output.rows.segments, strict=True):
        visible = torch.div(output.rows.positions[segment.rows] + 1, ratio, rounding_mode="floor")
        pools.append(_random_blocks(blocks, -(-visible // size), generator))
    return replace(output, pools=pools)


def _random_blocks(blocks_TB: Tensor, visible_T: Tensor, generator: torch.Generator) -> Tensor:
    """Draw as many different blocks per row as were kept, from the first `visible_T`; -1 elsewhere."""
    keys = torch.rand((len(blocks_TB), int(visible_T.max())), generator=generator)
    keys = keys.masked_fill(torch.arange(keys.shape[1]) >= visible_T.unsqueeze(1), -1.0)
    drawn = keys.topk(min(blocks_TB.shape[1], keys.shape[1]), 1).indices
    drawn = torch.nn.functional.pad(drawn, (0, blocks_TB.shape[1] - drawn.shape[1]), value=-1)
    return torch.where(blocks_TB >= 0, drawn, -1)


def _cell(layer: int, kind: str, tokens: int, share: float, found: Sequence[dict[int, _Seen]]) -> PoolCell:
    recall, mass = mean([one[layer].recall for one in found]), mean([one[layer].mass for one in found])
    return PoolCell(
        layer=layer,
        kind=kind,
        tokens=tokens,
        share=min(1.0, share),
        recall=recall.value,
        recall_stderr=recall.stderr,
        mass=mass.value,
        mass_stderr=mass.stderr,
        picked_mass=mean([one[layer].picked for one in found]).value,
        documents=len(found),
    )
