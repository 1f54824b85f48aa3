"""Properties of the reference that follow from what its parts are for, not from recorded numbers."""

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.reference import (
    attention,
    engram,
    layer,
    model,
    moe,
    rope,
    selection,
    streams,
    vision,
)
from tests.factories import tiny_config
from tests.golden_mini import ROW_TOLERANCE, config, golden, row_errors, run, weights

IDS = run("text.")["input_ids"][0].tolist()


def forward(ids: list[int] = IDS, changed: dict[str, Tensor] | None = None, **options: object) -> dict[str, Tensor]:
    return model.forward(weights() | (changed or {}), config(), ids, token_map=golden()["token_map"], **options)


def longer_ids(num_tokens: int) -> list[int]:
    return torch.randint(0, 500, (num_tokens,)).tolist()


# -------------------------------------------------------------------------------------------------------- attention


def window_layer(u_TD: Tensor, start: int, *, turn_back: bool = True) -> Tensor:
    """Run the window attention of layer 0 up to the heads' outputs, at positions from `start` on."""
    freqs = rope.frequencies(config(), 0)
    positions = torch.arange(start, start + len(u_TD))
    latent = attention.latent_queries(weights(), "layers.0.attn", config(), u_TD)
    q = attention.queries(weights(), "layers.0.attn", config(), latent, positions, freqs)
    entries = attention.window_entries(weights(), "layers.0.attn", config(), u_TD, positions, freqs)
    allowed = attention.window_mask(positions, config().window)
    heads = attention.attend(q, entries, allowed, weights()["layers.0.attn.attn_sink"])
    return rope.rotate(heads, positions, freqs, inverse=True) if turn_back else heads


def test_output_does_not_depend_on_where_the_sequence_starts() -> None:
    u = run("text.")["layers.0.attn_in"][0, :6]
    here, there = window_layer(u, 0).float(), window_layer(u, 64).float()
    # entries are rounded after their rotation, so equality is up to that rounding
    assert (here - there).norm() / here.norm() < 0.05
    here, there = (window_layer(u, start, turn_back=False).float() for start in (0, 64))
    assert (here - there).norm() / here.norm() > 0.15


def test_rows_see_exactly_the_window() -> None:
    seen = attention.window_mask(torch.arange(100, 130), 8).sum(dim=1)
    assert seen.tolist() == [1, 2, 3, 4, 5, 6, 7, *[8] * 23]
    u = torch.randn(20, config().hidden_size).bfloat16()
    changed = u.clone()
    changed[2] += 1
    difference = (window_layer(u, 0) != window_layer(changed, 0)).flatten(1).any(dim=1)
    assert difference.tolist() == [2 <= row < 2 + config().window for row in range(20)]


def test_rows_that_may_see_nothing_are_zero_and_finite() -> None:
    q, entries = torch.randn(3, 2, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    allowed = torch.zeros(3, 5, dtype=torch.bool)
    allowed[2, 1] = True
    for sink in (torch.zeros(2), torch.tensor([-50.0, 50.0])):
        out = attention.attend(q, entries, allowed, sink)
        assert torch.isfinite(out).all()
        assert out[:2].count_nonzero() == 0


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    entries = torch.ones(1, 32).bfloat16()
    q, allowed = torch.zeros(1, 1, 32).bfloat16(), torch.ones(1, 1, dtype=torch.bool)
    for sink, share in ((0.0, 0.5), (-100.0, 1.0), (100.0, 0.0)):
        out = attention.attend(q, entries, allowed, torch.tensor([sink]))
        assert out.unique().tolist() == pytest.approx([share], abs=1e-6)


def test_scores_are_scaled_by_head_width_alone() -> None:
    # two entries, one score of sqrt(H) x log 3 before scaling: the weights are 3 to 1
    width = 64
    q, entries = torch.zeros(1, 1, width).bfloat16(), torch.zeros(2, width).bfloat16()
    q[..., 0], entries[0, 0] = 8.0, 1.0
    out = attention.attend(q, entries, torch.ones(1, 2, dtype=torch.bool), torch.tensor([-1e9]))
    expected = 1 / (1 + torch.tensor(-8.0 / width**0.5).exp())
    assert float(out[0, 0, 0]) == pytest.approx(float(expected), rel=5e-3)


def test_queries_are_not_normalised_head_by_head() -> None:
    name = "layers.0.attn.wq_b.scale"
    four_times = (weights()[name].view(torch.uint8) + 2).view(torch.float8_e8m0fnu)
    plain, louder = forward()["layers.0.attn_out"], forward(changed={name: four_times})["layers.0.attn_out"]
    assert (plain.float() - louder.float()).norm() / plain.float().norm() > 0.05


# -------------------------------------------------------------------------------------------------------- selection


def test_coarse_index_scores_round_dots_products_and_sums() -> None:
    # one head, dots 257 and 1 + 2^-8: both lie half way between two bfloat16 numbers and go to the even one
    keys = torch.tensor([[257.0, 0.0], [0.0, 1.00390625]])
    q = torch.ones(1, 1, 2)
    one = torch.ones(1, 1)
    assert selection.index_scores(q, one, keys, "fp32").tolist() == [[257.0, 1.00390625]]
    assert selection.index_scores(q, one, keys, "bf16").tolist() == [[256.0, 1.0]]
    # three times 256, not three times 257, which would round to 772
    assert selection.index_scores(q, 3 * one, keys, "bf16")[0, 0] == 768
    # two heads: 256 + 1 is rounded once more, and a weight of 257 counts as 256
    two = torch.tensor([[[256.0, 0.0], [1.0, 0.0]]])
    assert selection.index_scores(two, torch.tensor([[1.0, 1.0]]), torch.eye(2), "bf16")[0, 0] == 256
    assert selection.index_scores(two, torch.tensor([[257.0, 0.0]]), torch.eye(2), "bf16")[0, 0] == 256 * 256


def test_negative_dots_count_as_nothing() -> None:
    q, keys = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0], [-2.0]])
    for precision in ("bf16", "fp32"):
        assert selection.index_scores(q, torch.tensor([[3.0, 5.0]]), keys, precision).tolist() == [[6.0, 10.0]]


def test_entries_are_visible_from_their_last_token_on() -> None:
    counts = {ratio: selection.visible(torch.arange(5), 5, ratio).sum(dim=1).tolist() for ratio in (1, 2)}
    assert counts == {1: [1, 2, 3, 4, 5], 2: [0, 1, 1, 2, 2]}
    assert selection.visible(torch.tensor([4, 5]), 3, 2).tolist() == [[True, True, False], [True, True, True]]


def test_third_pair_is_rotated_as_position_four() -> None:
    assert attention.group_positions(3, 2, torch.device("cpu")).tolist() == [0, 2, 4]
    latent = torch.randn(3, config().head_dim).bfloat16()
    freqs = rope.frequencies(config(), 2)
    expected = attention.quantise_entry(rope.rotate(latent[2:], torch.tensor([4]), freqs)).dequantise()
    assert torch.equal(attention.compressed_entries(latent, 2, freqs)[2:], expected)


def test_newest_block_is_always_a_candidate() -> None:
    scores = torch.full((1, 24), 100.0)
    scores[0, 20:] = -100.0
    everything = torch.ones(1, 24, dtype=torch.bool)
    kept = selection.candidates(scores, everything, 4, 3)
    assert kept.nonzero()[:, 1].tolist() == [*range(8), *range(20, 24)]
    # a row that sees 17 entries pins the block of the 17th, and keeps all of it
    partly = everything.clone()
    partly[0, 17:] = False
    assert selection.candidates(scores, partly, 4, 3).nonzero()[:, 1].tolist() == [*range(8), *range(16, 20)]


def test_rows_without_visible_entries_have_no_candidates_and_no_picks() -> None:
    scores, nothing = torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.bool)
    assert not selection.candidates(scores, nothing, 4, 2).any()
    assert not selection.best(scores.masked_fill(~nothing, -torch.inf), 3).any()


def test_equal_scores_go_to_the_lower_position() -> None:
    scores = torch.tensor([[0.0, 1.0, -0.0, 0.0, 1.0, 0.0]])
    assert selection.best(scores, 4).nonzero()[:, 1].tolist() == [0, 1, 2, 4]


def test_all_visible_entries_are_picked_while_they_fit() -> None:
    topk = forward()["layers.6.topk"][0]
    for row in range(config().index_topk):
        assert topk[row].tolist() == [*range(row + 1), *[-1] * (config().index_topk - row - 1)]


def test_restricted_layers_pick_candidates_only_and_the_source_picks_freely() -> None:
    trace = forward()
    allowed = trace["layers.6.candidates"][0].bool()
    for name, restricted in (("layers.8.topk", True), ("layers.6.topk", False)):
        outside = [row for row, picks in enumerate(trace[name][0]) if not allowed[row, picks[picks >= 0]].all()]
        assert bool(outside) is not restricted


# ------------------------------------------------------------------------------------------------ streams and experts


def test_streams_flow_from_the_first_axis_of_the_mix_to_the_second() -> None:
    settings = tiny_config()
    logits = torch.zeros(3, 3)
    for source in range(3):
        logits[source, (source + 1) % 3] = 40.0
    raw = torch.cat((torch.zeros(6), logits.flatten()))[None]
    mix = streams.coefficients(raw, torch.ones(3), torch.zeros(15), settings)
    x = torch.tensor([1.0, 10.0, 100.0]).bfloat16()[None, :, None].repeat(1, 1, 4)
    out = streams.expand(torch.zeros(1, 4).bfloat16(), x, mix)
    assert out[0, :, 0].tolist() == [100.0, 1.0, 10.0]


def test_streams_start_as_copies_of_which_the_first_is_read() -> None:
    h = torch.randn(2, 8).bfloat16()
    x, pre = streams.start(h, 3)
    assert all(torch.equal(x[:, i], h) for i in range(3))
    assert pre.tolist() == [[1.0, 0.0, 0.0]] * 2


def test_mixes_are_normalised_by_columns_the_given_number_of_times() -> None:
    eps, a = 0.1, torch.tensor([[0.0, 2.0, -1.0], [1.0, 0.0, 0.5], [3.0, -2.0, 0.0]])
    expected = a.softmax(dim=1) + eps
    for step in range(2):
        if step:
            expected = expected / (expected.sum(dim=1, keepdim=True) + eps)
        expected = expected / (expected.sum(dim=0, keepdim=True) + eps)
    assert torch.allclose(streams.sinkhorn(a[None], 2, eps)[0], expected)
    assert not torch.allclose(streams.sinkhorn(a[None], 3, eps)[0], expected)


def test_the_first_half_reads_stream_zero_and_ignores_its_own_mix() -> None:
    name = "layers.0.hc_attn_base"
    louder = weights()[name].clone()
    louder[: config().num_streams] += 3
    plain, changed = forward(), forward(changed={name: louder})
    assert torch.equal(plain["layers.0.attn_in"], changed["layers.0.attn_in"])
    assert not torch.equal(plain["layers.0.ffn_in"], changed["layers.0.ffn_in"])


def test_the_last_mix_collapses_the_streams_for_the_head() -> None:
    name = f"layers.{config().num_layers - 1}.hc_ffn_base"
    louder = weights()[name].clone()
    louder[: config().num_streams] += torch.arange(config().num_streams)
    plain, changed = forward(), forward(changed={name: louder})
    assert torch.equal(plain["layers.9.x_out"], changed["layers.9.x_out"])
    assert not torch.equal(plain["logits_all"], changed["logits_all"])


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_experts_of_a_row_are_distinct_whatever_the_router_says(value: float) -> None:
    gate = {"g.weight": torch.full((8, 32), value).bfloat16(), "g.bias": torch.zeros(8)}
    picked, _ = moe.route(gate, "g", torch.ones(4, 32).bfloat16(), num_picks=3, route_scale=1.0, image_T=None)
    assert picked.tolist() == [[0, 1, 2]] * 4


def test_image_rows_are_routed_by_their_own_bias_and_weighed_without_it() -> None:
    bias, bias_vl = torch.zeros(4), torch.zeros(4)
    bias[0], bias_vl[3] = 9.0, 9.0
    gate = {"g.weight": torch.zeros(4, 32).bfloat16(), "g.bias": bias, "g.bias_vl": bias_vl}
    image = torch.tensor([False, True])
    picked, weight = moe.route(gate, "g", torch.ones(2, 32).bfloat16(), num_picks=2, route_scale=1.5, image_T=image)
    assert picked.tolist() == [[0, 1], [3, 0]]
    assert weight.flatten().tolist() == pytest.approx([0.75] * 4)


def test_hidden_values_of_an_expert_are_clamped_on_the_right_sides() -> None:
    # gate = x and up = +-x, so hidden = silu(min(x, 10)) x clamp(+-x, -10, 10)
    eye, one = torch.eye(32), torch.ones(1, 1).to(torch.float8_e8m0fnu)
    sides = torch.ones(32)
    sides[1] = -1
    stored = {f"e.{name}.scale": one for name in ("w1", "w2", "w3")}
    stored |= {f"e.{name}.weight": eye.to(torch.float8_e4m3fn) for name in ("w1", "w2")}
    stored["e.w3.weight"] = (eye * sides).to(torch.float8_e4m3fn)
    x = torch.zeros(1, 32).bfloat16()
    x[0, :3] = torch.tensor([40.0, 40.0, -40.0])
    expected = {10.0: [100.0, -100.0, 0.0], 0.0: [1600.0, -1600.0, 0.0]}
    for limit, hidden in expected.items():
        actual = moe.expert(stored, "e", x, limit)[0, :3].tolist()
        assert actual == pytest.approx(hidden, rel=0.07, abs=1e-3)  # E4M3 keeps three bits


# ------------------------------------------------------------------------------------------------- n-grams and images


def test_no_n_gram_bridges_an_image() -> None:
    a, b, c, image, d, e, f, g, pad = 11, 12, 13, 99, 14, 15, 16, 17, 2
    ids, dead = [a, b, c, image, image, d, e, f, g], [False] * 3 + [True] * 2 + [False] * 4
    seen = [engram.history(ids, dead, position, pad, 4) for position in range(9)]
    assert seen[2] == [c, b, a, pad]
    assert seen[3] == seen[4] == [pad] * 4
    assert seen[5:] == [[d, pad, pad, pad], [e, d, pad, pad], [f, e, d, pad], [g, f, e, d]]


def test_image_positions_leave_the_n_gram_injection_unchanged() -> None:
    x = torch.randn(5, config().num_streams, config().hidden_size).bfloat16()
    rows = torch.randint(0, 1362, (5, config().engram.num_columns))
    dead = torch.tensor([False, True, True, False, False])
    out = engram.inject(weights(), "layers.1.engram", config(), x, rows, dead)
    assert (out == x).flatten(1).all(dim=1).tolist() == dead.tolist()


def test_patch_grids_that_cannot_be_told_apart_are_refused() -> None:
    types = torch.tensor([0, 1, 1, 2, 1, 1, 2, 3])
    with pytest.raises(UserError, match="2 choices of patch grids"):
        vision.images_from(types, torch.zeros(20, 3, 14, 14), 3)
    (grid,) = vision.images_from(types, torch.zeros(25, 3, 14, 14), 3).grids
    assert grid == (5, 5)


# ------------------------------------------------------------------------------------------------- causality, replay


def test_rows_of_a_layer_do_not_depend_on_later_rows() -> None:
    fed, other = run("text."), run("text.")
    for i in range(config().num_layers):
        other[f"layers.{i}.x_in"] = other[f"layers.{i}.x_in"].clone()
        other[f"layers.{i}.x_in"][:, 40:] = torch.randn(1, 21, config().num_streams, config().hidden_size).bfloat16()
    before, after = forward(feed=fed), forward(feed=other)
    for i in range(config().num_layers):
        for part in ("attn_out", "topk", "candidates"):
            name = f"layers.{i}.{part}"
            if name in before:
                assert torch.equal(before[name][:, :40], after[name][:, :40]), name
                assert not torch.equal(before[name][:, 40:], after[name][:, 40:]), name


def test_unfinished_pairs_give_no_entry() -> None:
    assert [forward(IDS[:n])["layers.2.compress_kv"].shape[1] for n in (1, 2, 3, 7)] == [0, 1, 1, 3]


def test_replay_from_the_first_row_is_the_full_run() -> None:
    full, replayed = forward(), forward(replay_start=0)
    assert full.keys() == replayed.keys()
    assert all(torch.equal(full[name], replayed[name]) for name in full)


def test_replay_changes_nothing_in_the_encoder_and_in_what_the_decoder_reads() -> None:
    start = len(IDS) - config().window
    full, replayed = forward(), forward(replay_start=start)
    shared = [f"layers.{i}." for i in range(config().cut)] + ["layers.6.compress_kv", "layers.6.index_k"]
    for name in full:
        if name.startswith(tuple(shared)):
            assert torch.equal(full[name], replayed[name]), name
    # the first decoder layer is given the same rows
    assert torch.equal(full["layers.6.x_in"][:, start:], replayed["layers.6.x_in"][:, start:])


def test_replay_marks_rows_that_the_decoder_did_not_run_on() -> None:
    start = len(IDS) - config().window
    trace = forward(replay_start=start)
    for name, tensor in trace.items():
        part = name.rpartition(".")[2]
        if part in ("compress_kv", "index_k") or not (name.startswith(("layers.6.", "layers.9.", "logits", "main"))):
            continue
        skipped, run_rows = tensor[0, :start], tensor[0, start:]
        if part == "topk":
            assert (skipped == -1).all()
        elif part == "candidates":
            assert (skipped == 0).all()
        else:
            assert skipped.isnan().all(), name
            assert run_rows.isfinite().all(), name


def test_replay_cuts_the_window_at_its_start() -> None:
    start = len(IDS) - config().window
    full, replayed = forward(feed=run("text.")), forward(feed=run("text."), replay_start=start)
    name = "layers.9.attn_out"
    errors = row_errors(replayed[name][:, start:], full[name][:, start:])
    # the last row has its whole window, every row before it lacks entries at the front
    assert (errors > ROW_TOLERANCE).tolist() == [True] * (config().window - 1) + [False]


def test_replay_of_enough_rows_gives_the_last_row_of_the_full_run() -> None:
    ids = longer_ids(100)
    decoder_layers = config().num_layers - config().cut
    reach = decoder_layers * (config().window - 1) + 1
    full = forward(ids)["layers.9.x_out"][0, -1].float()
    enough, too_few = (forward(ids, replay_start=100 - n)["layers.9.x_out"][0, -1].float() for n in (reach, 17))
    # rows are computed in products of another height, so a rounding may fall the other way
    assert (full - enough).norm() < 0.02 * full.norm()
    assert (full - too_few).norm() > 0.02 * full.norm()


def test_draft_taps_are_the_means_of_what_tapped_layers_are_given() -> None:
    taps = config().draft.tap_layers
    fed = {f"layers.{i}.x_in": torch.randn_like(run("text.")[f"layers.{i}.x_in"]) for i in taps}
    means = [fed[f"layers.{i}.x_in"].float().mean(dim=2).bfloat16() for i in taps]
    assert torch.equal(forward(feed=fed)["main_hidden"], torch.cat(means, dim=-1))


def test_a_half_gets_the_collapsed_and_normalised_streams() -> None:
    trace = forward()
    x, pre = trace["layers.4.x_in"][0], trace["layers.4.pre_in"][0]
    u = layer.half_input(weights(), "layers.4.attn_norm", config(), x, pre)
    assert torch.equal(u, trace["layers.4.attn_in"][0])


@pytest.mark.parametrize(
    ("ids", "sentence"), [([5, -1, 7], "token id -1 at position 1"), ([512], "outside 0..511"), ([], "empty")]
)
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        forward(ids)


def test_a_missing_token_map_is_refused() -> None:
    with pytest.raises(UserError, match="token map"):
        model.forward(weights(), config(), IDS)
