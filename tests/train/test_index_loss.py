"""The index loss: its teacher, its student, who learns from it, and on which rows."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from headrace.core.errors import InternalError
from headrace.kernels.rope import rotate, rotation
from headrace.train import index_loss as subject
from headrace.train.graph import Document, GraphOptions, GraphOutput, Segment, TrainGraph
from headrace.train.index_loss import (
    IndexLossSettings,
    SourceLoss,
    attention_share,
    first_eligible,
    index_loss,
)
from tests.traces import same_bits
from tests.train.graphs import EXACT, SERVED, gradients_of, lively_graph, micro_config, run_pass, token_ids

KEY = (3, 0)
RECORDED = replace(EXACT, has_records=True)
DOCUMENTS = [Document(token_ids(31, 1)), Document(token_ids(60, 2))]
POOLS = ("visible", "picked")
OWNERS = {1: 1, 3: 3, 4: 4, 5: 4}  # index source: its KV owner
SERVED_LAYERS = {1: [1, 2], 3: [3], 4: [4], 5: [5, 6]}


@cache
def graph() -> TrainGraph:
    return lively_graph(micro_config(), dtype=torch.float64)


@cache
def output() -> GraphOutput:
    return graph().forward(DOCUMENTS, RECORDED)


def losses(
    pool: str = "visible",
    rows: int | None = None,
    key: tuple[int, ...] = KEY,
    of: GraphOutput | None = None,
) -> dict[int, SourceLoss]:
    settings = IndexLossSettings(pool=pool, max_rows=rows)
    return index_loss(graph(), of or output(), RECORDED, settings, key)


# ---------------------------------------------------------------------------------------- a second way to compute it


def plain_row(source: int, document: int, position: int, pool: str) -> Tensor:
    """Return the divergence of one query row, in loops over heads and entries, from the definition."""
    config, found = graph().config, output()
    offset = 0 if document == 0 else 31
    row, owner = offset + position, OWNERS[source]
    store = found.documents[document].stores[owner]
    ratio = config.compress_ratios[source]
    visible = list(range((position + 1) // ratio))
    local = position
    if pool == "picked":
        chosen = [int(e) for e in found.published[source][document][local] if e >= 0]
    elif source == 5 and not bool((found.pools[document][local] < 0).all()):
        blocks = {int(b) for b in found.pools[document][local] if b >= 0}
        chosen = [e for e in visible if e // config.candidate_block_size in blocks]
    else:
        chosen = visible
    teacher = torch.zeros(len(chosen), dtype=torch.float64)
    for layer in SERVED_LAYERS[source]:
        projected, sink = found.records[layer].projected, found.layers[layer].attention.sink
        mass = torch.zeros(len(chosen), dtype=torch.float64)
        for head in range(config.num_heads):
            q = projected.q_TQH[row, head]
            near = range(max(0, position - config.window + 1), position + 1)
            window = [q @ projected.window_TH[offset + p] * config.head_dim**-0.5 for p in near]
            entries = [q @ store.rows[e] * config.head_dim**-0.5 for e in chosen]
            whole = torch.stack([*window, *entries, sink[head]])
            mass += torch.softmax(whole, 0)[len(window) : len(window) + len(entries)].detach()
        teacher += mass / mass.sum() / len(SERVED_LAYERS[source])
    scores = torch.stack([plain_score(source, row, position, store.keys[e]) for e in chosen])
    return (teacher * (teacher.log() - torch.log_softmax(scores, 0))).sum()


def plain_score(source: int, row: int, position: int, key: Tensor) -> Tensor:
    config, found = graph().config, output()
    projected, indexer = found.records[source].projected, found.layers[source].indexer
    turn = rotation(torch.tensor([position]), graph().frequencies.compressed)
    queries = (projected.latent8[row] @ indexer.q_b.T).view(1, config.index_heads, config.index_head_dim)
    weights = found.records[source].u_TD[row] @ indexer.head_weights.T
    total = sum(w * torch.relu(q @ key) for w, q in zip(weights, rotate(queries, *turn)[0], strict=True))
    return total / (config.index_head_dim * config.index_heads) ** 0.5


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("source", OWNERS)
def test_the_loss_is_the_mean_divergence_of_its_definition(source: int, pool: str) -> None:
    found = losses(pool)[source]
    first = graph().config.window + graph().config.compress_ratios[source] * graph().config.index_topk
    rows = [(document, p) for document, count in ((0, 31), (1, 60)) for p in range(first, count)]
    assert found.count == found.eligible == len(rows)
    wanted = sum(plain_row(source, document, position, pool) for document, position in rows)
    torch.testing.assert_close(found.numerator, wanted, rtol=1e-10, atol=1e-10)
    assert found.numerator > 0
    ours, theirs = gradients_of(found.numerator, graph()), gradients_of(wanted, graph())
    assert sorted(ours) == sorted(theirs)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------------- who learns


def trained_by(source: int) -> set[str]:
    own = {f"layers.{source}.attn.indexer.{part}.weight" for part in ("wq_b", "weights_proj")}
    return own | {f"layers.{OWNERS[source]}.attn.indexer.{part}.weight" for part in ("wk", "k_norm")}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("source", OWNERS)
def test_a_source_trains_its_queries_and_its_owners_keys_and_nothing_else(source: int, pool: str) -> None:
    gradients = gradients_of(losses(pool)[source].numerator, graph())
    assert set(gradients) == trained_by(source)
    assert all(gradient.any() for gradient in gradients.values())


def test_shared_keys_get_the_sum_over_the_sources_of_their_owner() -> None:
    found = losses()
    together = gradients_of(found[4].numerator + found[5].numerator, graph())
    for part in ("wk", "k_norm"):
        name = f"layers.4.attn.indexer.{part}.weight"
        alone = [gradients_of(found[source].numerator, graph())[name] for source in (4, 5)]
        torch.testing.assert_close(together[name], alone[0] + alone[1], rtol=1e-10, atol=1e-12)
        assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backbone_learns_what_it_learns_without_the_index_loss(dtype: torch.dtype) -> None:
    own = lively_graph(micro_config())
    options = replace(SERVED[dtype], has_records=True)
    plain = run_pass(own, DOCUMENTS, SERVED[dtype])
    recorded = run_pass(own, DOCUMENTS, options)
    index = index_loss(own, recorded.output, options, IndexLossSettings(), KEY)
    both = run_pass(own, DOCUMENTS, options)
    extra = index_loss(own, both.output, options, IndexLossSettings(), KEY)
    alone = gradients_of(sum(one.numerator for one in index.values()), own)
    assert sorted(alone) == sorted(name for name in own.masters.parameters if ".indexer." in name)
    for name, gradient in alone.items():
        assert gradient.any(), name
        assert gradient.isfinite().all(), name
    assert not set(alone) & set(plain.gradients)
    for name, gradient in plain.gradients.items():
        assert same_bits(recorded.gradients[name], gradient), name
    assert same_bits(sum(one.numerator for one in extra.values()), sum(one.numerator for one in index.values()))


def test_gradients_are_those_of_finite_differences() -> None:
    """Picks, pool and teacher are fixed, so that only the student moves."""
    own = lively_graph(micro_config(), dtype=torch.float64)  # moved in place, so not the shared one
    names = sorted(set().union(*(trained_by(source) for source in OWNERS)))
    gradients = gradients_of(sum(one.numerator for one in losses().values()), graph())
    step = 1e-7  # scores have kinks

    def moved(name: str, direction: Tensor, sign: float) -> float:
        parameter = own.masters.parameters[name]
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter += sign * step * direction
            fresh = own.forward(DOCUMENTS, RECORDED)
            moved_loss = float(sum(one.numerator for one in losses(of=fresh).values()))
            parameter.copy_(before)
        assert all(a.equal(b) for s in OWNERS for a, b in zip(fresh.published[s], output().published[s], strict=True))
        return moved_loss

    for name in names:
        direction = torch.randn_like(own.masters.parameters[name])
        expected = float((gradients[name] * direction).sum())
        assert abs(expected) > 1e-2, name
        difference = (moved(name, direction, 1) - moved(name, direction, -1)) / (2 * step)
        assert difference == pytest.approx(expected, rel=1e-5, abs=1e-5), name


# ------------------------------------------------------------------------------------------------------- the teacher


def test_a_teacher_is_a_share_of_the_whole_softmax() -> None:
    near, far, sink = torch.randn(4, 3, 6).double(), torch.randn(4, 3, 9).double(), torch.randn(3).double()
    near[1, :, 2:] = float("-inf")
    is_pool = torch.rand(4, 9) < 0.6
    is_pool[:, 0] = True
    share = attention_share(near, far, is_pool, sink)
    torch.testing.assert_close(share.sum(1), torch.ones(4).double())
    assert share.gt(0).equal(is_pool)
    whole = torch.softmax(
        torch.cat([near, far.masked_fill(~is_pool[:, None], -1e9), sink.expand(4, 3)[..., None]], 2), 2
    )
    mass = whole[:, :, 6:15].sum(1)
    torch.testing.assert_close(share, mass / mass.sum(1, keepdim=True))


def test_a_head_that_looks_at_its_window_has_little_say() -> None:
    """A softmax over global entries alone would hear both heads alike."""
    near, far = torch.zeros(1, 2, 1), torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    near[0, 1] = 25.0
    share = attention_share(near, far, torch.ones(1, 2, dtype=torch.bool), torch.zeros(2))
    assert share[0, 0] > 0.999
    near[0, 1], sink = 0.0, torch.tensor([0.0, 25.0])
    assert attention_share(near, far, torch.ones(1, 2, dtype=torch.bool), sink)[0, 0] > 0.999


def test_a_row_whose_heads_all_look_at_their_windows_has_a_teacher() -> None:
    near, far = torch.full((1, 2, 1), 300.0), torch.tensor([[[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]])
    share = attention_share(near, far, torch.ones(1, 3, dtype=torch.bool), torch.zeros(2))
    torch.testing.assert_close(share[0], torch.softmax(far[0, 0], 0))


# ---------------------------------------------------------------------------------------------------------- the rows


def test_rows_are_drawn_from_the_key() -> None:
    few = losses(rows=7)
    assert [one.count for one in few.values()] == [7] * 4
    assert [one.eligible for one in few.values()] == [one.count for one in losses().values()]
    assert same_bits(losses(rows=7)[5].numerator, few[5].numerator)
    assert not same_bits(losses(rows=7, key=(3, 1))[5].numerator, few[5].numerator)
    assert not same_bits(losses(rows=7, key=(4, 0))[5].numerator, few[5].numerator)
    assert same_bits(losses(rows=1000)[5].numerator, losses()[5].numerator)


def test_a_choice_that_takes_everything_teaches_nothing() -> None:
    config = graph().config
    for ratio in (1, 2):
        first = first_eligible(config, ratio)
        assert (first - config.window) // ratio == config.index_topk
        assert (first + 1) // ratio > config.index_topk
    short = graph().forward([Document(token_ids(13, 1))], RECORDED)
    found = losses(of=short)
    assert [one.count for one in found.values()] == [0] * 4
    gradients = gradients_of(sum(one.numerator for one in found.values()), graph())
    assert set(gradients) == set().union(*(trained_by(source) for source in OWNERS))
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_weight_of_zero_leaves_gradients_of_zeros() -> None:
    gradients = gradients_of(0.0 * sum(one.numerator for one in losses().values()), graph())
    assert set(gradients) == set().union(*(trained_by(source) for source in OWNERS))
    assert not any(gradient.any() for gradient in gradients.values())


def test_pieces_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses()
    monkeypatch.setattr(subject, "_SCORES", 500)
    for source, found in losses().items():
        torch.testing.assert_close(found.numerator, whole[source].numerator, rtol=1e-12, atol=1e-12)
        assert found.sums == pytest.approx(whole[source].sums)


def test_segments_see_their_own_windows() -> None:
    ids = token_ids(60, 2)
    whole = Document(ids, (Segment(0, 60),))
    assert same_bits(losses(of=graph().forward([whole], RECORDED))[5].numerator, both(ids)[5].numerator)
    cut = losses(of=graph().forward([Document(ids, (Segment(30, 60, 30), Segment(20, 40, 20)))], RECORDED))
    parts = [both(ids, Segment(30, 60, 30)), both(ids, Segment(20, 40, 20))]
    for source in (4, 5):
        assert cut[source].count == sum(part[source].count for part in parts) == 50
        wanted = sum(part[source].numerator for part in parts)
        torch.testing.assert_close(cut[source].numerator, wanted, rtol=1e-12, atol=1e-12)
    assert same_bits(cut[1].numerator, parts[0][1].numerator)


def both(ids: object, *segments: Segment) -> dict[int, SourceLoss]:
    return losses(of=graph().forward([Document(ids, segments or None)], RECORDED))


def test_packed_documents_have_the_index_losses_they_have_apart() -> None:
    for source, found in losses().items():
        apart = [losses(of=graph().forward([document], RECORDED))[source] for document in DOCUMENTS]
        torch.testing.assert_close(found.numerator, apart[0].numerator + apart[1].numerator, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------- what is observed


def test_sums_say_what_picks_and_pool_keep() -> None:
    found = losses()
    for source, one in found.items():
        shares = {name: value / one.count for name, value in one.sums.items()}
        assert 0 < shares["kept"] < 1
        assert (0 < shares["pool"] < 1 and 0 < shares["recall"] < 1) == (source == 5)
        if source != 5:
            assert shares["pool"] == pytest.approx(1)
            assert shares["recall"] == 1
    assert found[5].sums["kept"] < found[5].sums["pool"]


def test_a_pool_that_holds_everything_loses_nothing() -> None:
    wide = lively_graph(micro_config(candidate_topk_blocks=100), dtype=torch.float64)
    found = index_loss(wide, wide.forward(DOCUMENTS, RECORDED), RECORDED, IndexLossSettings(max_rows=None), KEY)[5]
    assert found.sums["pool"] == pytest.approx(found.count)
    assert found.sums["recall"] == found.count


def test_training_brings_scores_nearer_to_attention() -> None:
    own = lively_graph(micro_config())
    options = replace(SERVED[torch.float32], has_records=True)
    indexer = [p for name, p in own.masters.parameters.items() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexer, lr=2e-2)
    history = []
    for _ in range(12):
        found = index_loss(own, own.forward(DOCUMENTS[1:], options), options, IndexLossSettings(max_rows=None), KEY)
        loss = sum(one.numerator / one.count for one in found.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((float(loss.detach()), sum(one.sums["kept"] / one.count for one in found.values())))
    assert history[-1][0] < 0.8 * history[0][0]
    assert history[-1][1] > history[0][1] + 0.1


def test_a_pass_without_records_is_refused() -> None:
    bare = graph().forward(DOCUMENTS, GraphOptions(dtype=torch.float64))
    with pytest.raises(InternalError, match="no record"):
        losses(of=bare)
