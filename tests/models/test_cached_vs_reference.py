"""The cached path computes what the whole-sequence reference computes, layer by layer, in both modes.

Every layer gets the reference's input, because random weights blow up any rounding that differs. Sums in another order
flip a few roundings; bounds are those of `tests/golden_mini.py`: selections and stored codes identical, floats within
2e-3, both in all but max(3, 3 %) of the rows, floats within 1e-2 as a whole (where there are rows enough to average).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.models.deepseek_v41.batch import Mode, Span
from headrace.models.deepseek_v41.images import encode_images
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.reference import draft
from headrace.models.deepseek_v41.reference import model as reference
from headrace.models.deepseek_v41.reference.vision import Images, images_from
from headrace.models.deepseek_v41.trace import PromptImages, Recorder, TraceOptions, trace
from headrace.vision.span import span_types
from tests.golden_mini import WHOLE_TOLERANCE, mismatch, row_errors, whole_error
from tests.traces import SHAPES, Synthetic, same_bits, synthetic, whole_span

MODES: tuple[Mode, ...] = ("full", "replay")
NUM_TOKENS = 83
ROWS = {"topk", "candidates", "compress_kv", "index_k"}
UNTRACED = {"index_score", "pre_out"}
FEW_ROWS = 40  # below, one row that a rounding moved is a large part of the whole
FEW_ROWS_WHOLE = 5e-2
DRAFT_LOGITS = 5e-3  # nearly all steps; nothing is fed between the stages, so a rounding grows in the rest
DRAFT_LOGITS_WORST = 5e-2


def referenced(
    own: Synthetic, ids: np.ndarray, replay_start: int | None = None, **options: object
) -> dict[str, Tensor]:
    return reference.forward(
        own.weights, own.config, ids.tolist(), token_map=own.token_map, replay_start=replay_start, **options
    )


def replay_start(own: Synthetic, num_tokens: int, mode: Mode) -> int | None:
    return None if mode == "full" else max(0, num_tokens - own.config.window)


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return one line for every tensor of the reference that is missing or beyond its bound."""
    found: list[str | None] = []
    for name, wanted in sorted(expected.items()):
        kind = name.rpartition(".")[2]
        if kind in UNTRACED:
            continue
        got = actual.get(name)
        if got is None or got.shape != wanted.shape:
            found.append(f"{name}: {'missing' if got is None else tuple(got.shape)}, expected {tuple(wanted.shape)}")
        elif kind in ROWS:
            off = int((got.to(wanted.dtype) != wanted)[0].flatten(1).any(1).sum())
            found.append(f"{name}: {off} rows differ" if off > max(3, 3 * wanted.shape[1] // 100) else None)
        elif not wanted.dtype.is_floating_point or kind == "embeds":
            found.append(None if torch.equal(got.to(wanted.dtype), wanted) else f"{name}: not identical")
        else:
            found.append(_float_difference(name, got, wanted))
    return [text for text in found if text]


def _float_difference(name: str, got: Tensor, wanted: Tensor) -> str | None:
    """Compare the rows that were computed; both sides must have computed the same ones."""
    computed = ~wanted[0].flatten(1).isnan().any(1)
    if not torch.equal(computed, ~got[0].flatten(1).isnan().any(1)):
        return f"{name}: other rows were computed"
    bound = WHOLE_TOLERANCE if int(computed.sum()) >= FEW_ROWS else FEW_ROWS_WHOLE
    return mismatch(name, got[:, computed], wanted[:, computed], bound)


# ---------------------------------------------------------------------------------------------------- whole prompts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_computes_what_the_reference_computes(shape: str, mode: Mode) -> None:
    for seed in (0, 1):
        own = synthetic(shape, seed)
        ids = own.ids(NUM_TOKENS, seed)
        expected = referenced(own, ids, replay_start(own, NUM_TOKENS, mode))
        actual = trace(own.model, ids, TraceOptions(mode=mode), feed=expected)
        assert differences(actual, expected) == []
        assert len(expected) >= 8 * own.config.num_layers  # names did not silently change on both sides


@pytest.mark.parametrize("shape", ["three streams", "no n-grams, no pool"])
def test_prompts_up_to_one_window_are_the_same_in_both_modes(shape: str) -> None:
    own = synthetic(shape)
    for num_tokens in (1, 2, own.config.window - 1, own.config.window):
        ids = own.ids(num_tokens)
        full, replay = (trace(own.model, ids, TraceOptions(mode=mode)) for mode in MODES)
        assert {name for name in full if not same_bits(full[name], replay[name])} == set()
        expected = referenced(own, ids)
        assert differences(trace(own.model, ids, TraceOptions(), feed=expected), expected) == []


def test_replay_is_an_approximation_of_full_and_not_the_same() -> None:
    own = synthetic("three streams")
    full, replay = (trace(own.model, own.ids(NUM_TOKENS), TraceOptions(mode=mode)) for mode in MODES)
    assert whole_error(replay["logits_all"][:, -1], full["logits_all"][:, -1]) > 1e-3


def test_float32_index_scores_are_those_of_the_reference() -> None:
    own = synthetic("three streams")
    ids = own.ids(NUM_TOKENS)
    numerics = replace(own.model.numerics, is_fp32_index=True)
    fine = DeepseekV41(
        own.config, own.model.parameters, own.model.addressing, device=own.model.device, numerics=numerics
    )
    expected = referenced(own, ids, index_scores="fp32")
    assert differences(trace(fine, ids, TraceOptions(mode="full"), feed=expected), expected) == []
    coarse = trace(own.model, ids, TraceOptions(mode="full"), feed=expected)
    assert any(not torch.equal(coarse[name].int(), expected[name].int()) for name in expected if "topk" in name)


def test_a_fed_cut_layer_produces_its_entries_from_the_fed_input() -> None:
    own = synthetic("three streams")
    ids, cut = own.ids(NUM_TOKENS), own.config.cut
    feed = referenced(own, ids)
    other = referenced(own, own.ids(NUM_TOKENS, seed=9))
    feed[f"layers.{cut}.x_in"] = other[f"layers.{cut}.x_in"]
    for mode in MODES:
        expected = referenced(own, ids, replay_start(own, NUM_TOKENS, mode), feed=feed)
        actual = trace(own.model, ids, TraceOptions(mode=mode), feed=feed)
        inputs = {name for name in expected if name.endswith(("x_in", "pre_in"))}  # not computed from what was fed
        assert differences(actual, {n: t for n, t in expected.items() if n not in inputs}) == []


# ------------------------------------------------------------------------------------------- decoding after a prompt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_decoded_after_a_prompt_are_those_of_the_reference(shape: str, mode: Mode) -> None:
    """After a replayed prompt the decoder's windows keep beginning at the start of that replay."""
    own = synthetic(shape)
    ids, prompt = own.ids(60), 51
    expected = referenced(own, ids, replay_start(own, prompt, mode))
    recorder = Recorder(len(ids), own.model, expected, "")
    first = whole_span(own.model, ids[:prompt], mode)
    steps = [Span(first.state, ids[place : place + 1], 1) for place in range(prompt, len(ids))]
    for span in (first, *steps):
        output = own.model.forward([span], wants_all_logits=True, wants_taps=True, probe=recorder)
        recorder.put("logits_all", output.decoder.positions, output.logits, float("nan"))
    recorder.finish(first.state)
    untaken = {"input_ids", "embeds", "engram_hash_ids", "main_hidden"}
    assert differences(recorder.tensors, {n: t for n, t in expected.items() if n not in untaken}) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["three streams", "wide window", "n-grams and taps on both sides of the cut"])
def test_drafts_are_those_of_the_reference(shape: str, mode: Mode) -> None:
    own = synthetic(shape)
    actual = trace(own.model, own.ids(NUM_TOKENS), TraceOptions(mode=mode, has_draft=True))
    first_row = replay_start(own, NUM_TOKENS, mode) or 0
    ids, errors = actual["draft.ids"][0], []
    assert len(ids) == NUM_TOKENS - first_row
    for step in range(len(ids)):
        taps, position = actual["main_hidden"][0], first_row + step
        wanted = draft.draft(own.weights, own.config, taps, int(ids[step, 0]), position, first_row=first_row)
        if torch.equal(ids[step, 1:], wanted.ids):
            pairs = (("logits", wanted.logits), ("confidence", wanted.confidence))
            errors.append(max(whole_error(actual[f"draft.{name}"][0, step], tensor) for name, tensor in pairs))
    some = max(1, len(ids) // 10)
    assert len(errors) >= len(ids) - some  # an arg max may fall the other way now and then
    assert sorted(errors)[-1 - some] < DRAFT_LOGITS
    assert max(errors) < DRAFT_LOGITS_WORST


# ----------------------------------------------------------------------------------------------------------- images


def pictures(own: Synthetic) -> tuple[np.ndarray, PromptImages, Images]:
    """Two images of different sizes, whose patches do not fill their cells, and text around them."""
    assert own.config.vision is not None
    assert own.config.image_token_id is not None
    types = np.concatenate([[-1] * 4, span_types((2, 3)), span_types((1, 2)), [-1] * 30])
    patches = torch.randn(4 * 7 + 1 * 4, 3, 14, 14).bfloat16()  # few enough that no other grids fit the cells
    ids = np.where(types >= 0, own.config.image_token_id, own.ids(len(types)))
    marks, rows = encode_images(own.model, patches, types)
    return ids, PromptImages(marks, rows), images_from(torch.from_numpy(types), patches, own.config.vision.downsample)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["three streams", "wide window"])
def test_images_are_embedded_routed_and_hashed_as_in_the_reference(shape: str, mode: Mode) -> None:
    own = synthetic(shape)
    ids, images, wanted = pictures(own)
    expected = referenced(own, ids, replay_start(own, len(ids), mode), images=wanted)
    actual = trace(own.model, ids, TraceOptions(mode=mode), feed=expected, images=images)
    assert float(row_errors(actual["embeds"], expected["embeds"]).max()) < 1e-3
    del expected["embeds"]
    assert differences(actual, expected) == []
