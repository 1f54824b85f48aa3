"""The cached path, through `trace`, against tensors that the vendor's code computed on the golden mini checkpoint.

Ids, selections and caches must be identical. Floats may differ by sums in another order, which moves a few rows by one
rounding; the bounds are those of `tests/golden_mini.py`.
"""

import pytest
import torch
from torch import Tensor

from headrace.kernels.native.choice import VARIABLE
from headrace.models.deepseek_v41.images import encode_images
from headrace.models.deepseek_v41.reference import model as reference
from headrace.models.deepseek_v41.trace import PromptImages, TraceOptions, trace
from tests.golden_mini import config, golden, mismatch, row_errors, run, weights, whole_error
from tests.models.test_reference_golden import fp32_feed
from tests.traces import KERNELS, golden_model

LAYER_INPUT = 2e-3  # whole tensor, as computed from a fed layer
EMBEDS = 1e-3
FIRST_LAYERS = 1e-2  # layers 0 and 1 of an unfed run
DRAFT_LOGITS = 5e-3
LOGITS = 1e-3  # one row; a single flipped rounding in the last layer moved one row by 6e-5
UNFED_LOGITS = 0.35  # two correct implementations end 0.02 to 0.35 apart on random weights

EXACT = {"engram_hash_ids", "topk", "candidates", "compress_kv", "index_k"}
# recorded `logits_all` row n is a run over the n first tokens alone; index scores and the pre-mix that leaves a layer
# are not traced
SEPARATE = {"logits_all", "logits_last", "argmax", "patches", "token_types", "embeds"}
UNTRACED = {"index_score", "pre_out"}


@pytest.fixture(autouse=True, params=KERNELS)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything under every numerics."""
    monkeypatch.setenv(VARIABLE, request.param)


def images() -> PromptImages:
    recorded = run("image.")
    marks, rows = encode_images(golden_model(), recorded["patches"], recorded["token_types"][0].numpy())
    return PromptImages(marks, rows)


def traced(prefix: str, **options: object) -> dict[str, Tensor]:
    """Trace the prompt of a recorded run in full mode, fed with that run if `feed` is given."""
    ids = run("image." if prefix == "image." else "text.")["input_ids"][0].numpy()
    feed = options.pop("feed", None)
    is_fp32 = prefix == "text_fp32idx."
    how = TraceOptions(mode="full", prefix=prefix, **options)
    pictures = images() if prefix == "image." else None
    return trace(golden_model(is_fp32_index=is_fp32), ids, how, feed=feed, images=pictures)


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return one line for every recorded tensor that is missing or differs by more than its bound."""
    found: list[str | None] = []
    for name in sorted(expected):
        kind = name.rpartition(".")[2]
        if name in SEPARATE or kind in UNTRACED:
            continue
        if name not in actual:
            found.append(f"{name}: missing")
        elif kind in EXACT:
            same = torch.equal(actual[name].to(expected[name].dtype), expected[name])
            found.append(None if same else f"{name}: not identical")
        else:
            found.append(mismatch(name, actual[name], expected[name]))
            if kind == "x_in" and whole_error(actual[name], expected[name]) > LAYER_INPUT:
                found.append(f"{name}: {whole_error(actual[name], expected[name]):.1e} off as a whole")
    return [text for text in found if text]


@pytest.mark.parametrize("prefix", ["text.", "image."])
def test_every_layer_fed_with_recorded_inputs_gives_the_recorded_tensors(prefix: str) -> None:
    recorded = run(prefix)
    compared = [name for name in set(recorded) - SEPARATE if name.rpartition(".")[2] not in UNTRACED]
    assert len(compared) == 84  # 10 layers x 7 tensors, 3 sources x 2, 4 selections, pool, hashes, taps
    assert differences(traced(prefix, feed=golden()), recorded) == []


def test_float32_index_scores_give_the_selections_recorded_with_them() -> None:
    # the recording has no pre-mixes of that run; the reference computes them from the recorded layer inputs
    feed = fp32_feed()
    ids = run("text.")["input_ids"][0].tolist()
    token_map = golden()["token_map"]
    own = reference.forward(weights(), config(), ids, token_map=token_map, feed=feed, index_scores="fp32")
    parts = {f"text_fp32idx.{name}": own[name] for name in own if name.endswith(".pre_in")}
    parts |= {f"text_fp32idx.{name}": tensor for name, tensor in feed.items()}
    parts["text_fp32idx.layers.0.x_in"] = run("text.")["layers.0.x_in"]
    actual = traced("text_fp32idx.", feed=parts)
    assert differences(actual, run("text_fp32idx.")) == []
    assert len([name for name in run("text_fp32idx.") if name.endswith(".topk")]) == 4


def test_the_two_precisions_of_index_scores_select_differently_somewhere() -> None:
    coarse = traced("text.", feed=golden())
    ids = run("text.")["input_ids"][0].numpy()
    how = TraceOptions(mode="full", prefix="text.")
    fine = trace(golden_model(is_fp32_index=True), ids, how, feed=golden())
    assert any(not torch.equal(coarse[name], fine[name]) for name in coarse if name.endswith(".topk"))


@pytest.mark.parametrize("prefix", ["text.", "image."])
def test_last_logits_with_every_layer_fed_are_the_recorded_ones(prefix: str) -> None:
    actual = traced(prefix, feed=golden())["logits_all"][:, -1]
    assert whole_error(actual, run(prefix)["logits_last"]) < LOGITS


def test_fed_logits_of_all_rows_agree_with_most_prefix_runs() -> None:
    errors = row_errors(traced("text.", feed=golden())["logits_all"], run("text.")["logits_all"])
    assert int((errors > LOGITS).sum()) <= 8  # rows that differ within the recording itself


@pytest.mark.parametrize("prefix", ["text.", "image."])
def test_unfed_first_layers_agree(prefix: str) -> None:
    actual, expected = traced(prefix), run(prefix)
    assert torch.equal(actual["engram_hash_ids"], expected["engram_hash_ids"])
    for name in ("layers.0.x_in", "layers.0.x_out", "layers.1.x_in", "layers.1.x_out"):
        assert whole_error(actual[name], expected[name]) < FIRST_LAYERS


def test_unfed_last_token_is_the_recorded_one() -> None:
    logits = traced("text.")["logits_all"][:, -1]
    assert int(logits.argmax()) == int(run("text.")["argmax"]) == 442
    assert whole_error(logits, run("text.")["logits_last"]) < UNFED_LOGITS


def test_image_tower_and_aligner_give_the_recorded_vectors() -> None:
    types = run("image.")["token_types"][0]
    cells = images().rows[types[types >= 0] == 1]
    assert whole_error(cells, run("image.")["embeds"]) < EMBEDS


def test_embeds_hold_the_image_vectors_inside_the_span_and_the_table_outside() -> None:
    embeds, types = traced("image.")["embeds"][0], run("image.")["token_types"][0]
    for kind, name in ((0, "image_start"), (2, "image_newline"), (3, "image_end")):
        for row in embeds[types == kind]:
            assert torch.equal(row, weights()[name])
    text = types == -1
    assert torch.equal(embeds[text], weights()["embed.weight"][run("image.")["input_ids"][0][text]])
    assert whole_error(embeds[types == 1], run("image.")["embeds"]) < EMBEDS


def test_drafts_from_recorded_taps_are_the_recorded_ones() -> None:
    actual, expected = traced("text.", feed=golden(), has_draft=True), run("decode_own.")
    assert actual["draft.ids"].shape == expected["dspark_ids"].shape
    same = (actual["draft.ids"] == expected["dspark_ids"])[0].all(1)
    assert int(same[:10].sum()) >= 9
    for step in range(2):
        assert whole_error(actual["draft.logits"][0, step], expected["dspark_logits"][0, step]) < DRAFT_LOGITS
        assert whole_error(actual["draft.confidence"][0, step], expected["dspark_confidence"][0, step]) < DRAFT_LOGITS


def test_a_trace_has_the_promised_tensors_and_shapes() -> None:
    actual, num_tokens = traced("text.", has_draft=True), 61
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in actual.items()}
    assert shapes["input_ids"] == ((1, num_tokens), torch.int64)
    assert shapes["embeds"] == ((1, num_tokens, 256), torch.bfloat16)
    assert shapes["logits_all"] == ((1, num_tokens, 512), torch.float32)
    assert shapes["main_hidden"] == ((1, num_tokens, 512), torch.bfloat16)
    assert shapes["engram_hash_ids"] == ((1, num_tokens, 2, 6), torch.int64)
    assert shapes["layers.6.candidates"] == ((1, num_tokens, num_tokens), torch.uint8)
    for layer_id, entries in ((2, 30), (4, 30), (6, 61), (8, 61)):
        assert shapes[f"layers.{layer_id}.topk"][0] == (1, num_tokens, 8)
        if layer_id < 8:
            assert shapes[f"layers.{layer_id}.compress_kv"] == ((1, entries, 64), torch.bfloat16)
            assert shapes[f"layers.{layer_id}.index_k"] == ((1, entries, 32), torch.bfloat16)
    for layer_id in range(10):
        for name in ("x_in", "x_out"):
            assert shapes[f"layers.{layer_id}.{name}"] == ((1, num_tokens, 4, 256), torch.bfloat16)
        for name in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
            assert shapes[f"layers.{layer_id}.{name}"] == ((1, num_tokens, 256), torch.bfloat16)
    assert shapes["draft.ids"][0][2] == 4  # the known token, then a block of three
    assert {name for name in shapes if name.startswith("draft.")} == {"draft.ids", "draft.logits", "draft.confidence"}


def test_a_prompt_of_few_entries_has_narrow_selections() -> None:
    actual = trace(golden_model(), run("text.")["input_ids"][0, :5].numpy(), TraceOptions(mode="full"))
    assert actual["layers.2.topk"][0].tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [0, 1]]
    assert actual["layers.6.topk"].shape == (1, 5, 5)
    assert actual["layers.6.candidates"].shape == (1, 5, 5)


def test_a_prompt_of_one_token_has_no_pair() -> None:
    actual = trace(golden_model(), run("text.")["input_ids"][0, :1].numpy(), TraceOptions(mode="full"))
    assert actual["layers.2.topk"].shape == (1, 1, 0)
    assert actual["layers.2.compress_kv"].shape == (1, 0, 64)
    assert torch.isfinite(actual["logits_all"]).all()
