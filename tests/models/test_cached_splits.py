"""The cached path gives the same bits however a sequence is cut, in prefill, in decode and beside other sequences."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import index_topk
from headrace.models.deepseek_v41.batch import Mode, Span
from headrace.models.deepseek_v41.draft import Drafter
from headrace.models.deepseek_v41.images import encode_images
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.models.deepseek_v41.trace import PromptImages, TraceOptions, trace
from tests.golden_mini import run
from tests.traces import SHAPES, Synthetic, differing, golden_model, same_bits, state_bits, synthetic, whole_span

SPLITS = (1, 2, 15, 16, 17, 31, 32, 40, 60, 61)
CHUNKS = (1, 2, 3, 7, 16, 61)
MODES: tuple[Mode, ...] = ("full", "replay")
LONG = 150  # more than two tiles of 64 queries, many windows, and far more entries than any pool here holds


def golden_ids() -> np.ndarray:
    return run("text.")["input_ids"][0].numpy()


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Tensor]]:
    """The golden prompt in one piece, with drafts, by mode."""
    return {mode: traced(golden_model(), golden_ids(), mode=mode) for mode in MODES}


def traced(
    model: DeepseekV41, ids: np.ndarray, images: PromptImages | None = None, **options: object
) -> dict[str, Tensor]:
    return trace(model, ids, TraceOptions(**options), images=images)


# -------------------------------------------------------------------------------------------------- one sequence


def check_splits(plain: dict[str, Tensor], splits: Iterable[int]) -> None:
    for split in splits:
        cut = traced(golden_model(), golden_ids(), mode="full", split=split)
        assert differing(cut, plain) == [], f"split after {split} tokens"


@pytest.mark.parametrize("split", SPLITS)
def test_decoding_after_any_split_is_the_plain_run(plain: dict[str, dict[str, Tensor]], split: int) -> None:
    check_splits(plain["full"], [split])


@pytest.mark.full
def test_decoding_after_every_split_is_the_plain_run(plain: dict[str, dict[str, Tensor]]) -> None:
    check_splits(plain["full"], range(1, 62))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks_is_the_plain_run(plain: dict[str, dict[str, Tensor]], mode: Mode, chunk: int) -> None:
    assert differing(traced(golden_model(), golden_ids(), mode=mode, chunk=chunk), plain[mode]) == []


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"mode": "full"}, [61]),
        ({"mode": "full", "split": 40}, [40, *[1] * 21]),
        ({"mode": "full", "chunk": 7}, [*[7] * 8, 5]),
        ({"mode": "full", "chunk": 16, "split": 40}, [16, 16, 8, *[1] * 21]),
        ({"mode": "replay", "chunk": 7}, [*[7] * 6, 3, 16]),  # the last chunk has a whole window
    ],
)
def test_cuts_are_really_made(monkeypatch: pytest.MonkeyPatch, options: dict[str, object], sizes: list[int]) -> None:
    """Equal bits would hide a cut that was ignored."""
    seen: list[int] = []
    forward = DeepseekV41.forward

    def counting(model: DeepseekV41, spans: list[Span], **rest: object) -> object:
        seen.extend(span.num_rows for span in spans)
        return forward(model, spans, **rest)

    monkeypatch.setattr(DeepseekV41, "forward", counting)
    traced(golden_model(), golden_ids(), **options)
    assert seen == sizes


@pytest.mark.parametrize("mode", MODES)
def test_drafts_after_chunks_are_those_of_the_plain_run(mode: Mode) -> None:
    ids = golden_ids()
    whole = traced(golden_model(), ids, mode=mode, has_draft=True)
    assert {"draft.ids", "draft.logits", "draft.confidence"} <= set(whole)
    assert differing(traced(golden_model(), ids, mode=mode, has_draft=True, chunk=7), whole) == []


def golden_images() -> tuple[np.ndarray, PromptImages]:
    recorded = run("image.")
    marks, rows = encode_images(golden_model(), recorded["patches"], recorded["token_types"][0].numpy())
    return recorded["input_ids"][0].numpy(), PromptImages(marks, rows)


@pytest.mark.parametrize(
    "options",
    [
        *({"mode": "full", "split": split} for split in (5, 9, 14)),  # the span is 5 to 14
        *({"mode": mode, "chunk": chunk} for mode in MODES for chunk in (1, 4, 7)),
    ],
    ids=str,
)
def test_cuts_through_an_image_change_nothing(options: dict[str, object]) -> None:
    ids, images = golden_images()
    whole = traced(golden_model(), ids, images, mode=options["mode"])
    assert differing(traced(golden_model(), ids, images, **options), whole) == []


def test_an_image_is_seen_by_what_follows_it() -> None:
    ids, images = golden_images()
    with_image, without = traced(golden_model(), ids, images, mode="full"), traced(golden_model(), ids, mode="full")
    changed = (with_image["logits_all"] != without["logits_all"])[0].any(1)
    assert changed.tolist() == [position >= 5 for position in range(35)]


# ---------------------------------------------------------------------------------------------- every architecture


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_a_long_prompt_are_the_plain_run_in_every_shape(shape: str, mode: Mode) -> None:
    own = synthetic(shape)
    ids = own.ids(LONG)
    whole = traced(own.model, ids, mode=mode)
    for chunk in (7, 64):
        assert differing(traced(own.model, ids, mode=mode, chunk=chunk), whole) == [], f"chunks of {chunk}"


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_across_a_tile_is_the_plain_run_in_every_shape(shape: str) -> None:
    own = synthetic(shape)
    ids = own.ids(LONG)[:132]
    assert differing(traced(own.model, ids, mode="full", split=123), traced(own.model, ids, mode="full")) == []


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_every_second_split_of_a_long_prompt_is_the_plain_run_in_every_shape(shape: str) -> None:
    own = synthetic(shape)
    ids = own.ids(LONG)
    whole = traced(own.model, ids, mode="full")
    for split in (*range(1, LONG, 12), 63, 64, 65, 127, 128, 129):
        assert differing(traced(own.model, ids, mode="full", split=split), whole) == [], f"split after {split}"


def test_the_pool_of_long_prompts_leaves_entries_out() -> None:
    for shape in ("three streams", "five streams, no draft", "wide window", "no encoder"):
        own = synthetic(shape)
        kept = traced(own.model, own.ids(LONG), mode="full")[f"layers.{own.config.cut}.candidates"][0]
        pool = own.config.candidate_blocks * own.config.candidate_block_size
        assert int(kept[-1].sum()) <= pool < LONG


def test_tiles_of_the_index_scan_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = synthetic("three streams")
    whole = traced(own.model, own.ids(LONG), mode="full")
    monkeypatch.setattr(index_topk, "KEY_TILE", 8)
    monkeypatch.setattr(index_topk, "_SCORE_BYTES", 600)
    assert differing(traced(own.model, own.ids(LONG), mode="full"), whole) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_both_modes_produce_the_same_global_entries(shape: str) -> None:
    own = synthetic(shape)
    full, replay = (traced(own.model, own.ids(61), mode=mode) for mode in MODES)
    names = [name for name in full if name.endswith((".compress_kv", ".index_k", "hash_ids", "embeds"))]
    names += [f"layers.{i}.x_out" for i in range(own.config.cut)]
    assert {"embeds", f"layers.{own.config.cut}.compress_kv"} <= set(names)
    assert [name for name in names if not same_bits(full[name], replay[name])] == []


def test_rows_the_decoder_did_not_run_on_are_marked(plain: dict[str, dict[str, Tensor]]) -> None:
    replay, cut, first = plain["replay"], golden_model().config.cut, 61 - golden_model().config.window
    for name, tensor in replay.items():
        layer_id = int(name.split(".")[1]) if name.startswith("layers.") else -1
        is_decoder = layer_id >= cut or name in {"logits_all", "main_hidden"}
        if name.endswith((".compress_kv", ".index_k")):
            assert torch.isfinite(tensor).all()
        elif tensor.dtype.is_floating_point:
            missing = tensor[0].flatten(1).isnan()
            assert missing.all(1).tolist() == [is_decoder and row < first for row in range(61)], name
            assert missing.any(1).equal(missing.all(1)), name
        elif is_decoder:
            assert (tensor[0, :first] == (-1 if name.endswith("topk") else 0)).all(), name
            assert (tensor[0, first:] > 0).any(1).all(), name


# -------------------------------------------------------------------------------------------------------- batches

LENGTHS = (5, 17, 8, 33)


def prompts(own: Synthetic, lengths: Iterable[int]) -> list[np.ndarray]:
    return [own.ids(length, seed=length) for length in lengths]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_prompts_and_its_decoding_equal_solo_runs(shape: str, mode: Mode) -> None:
    own = synthetic(shape)
    wanted = {"wants_all_logits": True, "wants_taps": own.config.draft is not None}
    spans = [whole_span(own.model, ids, mode) for ids in prompts(own, LENGTHS)]
    alone = [whole_span(own.model, ids, mode) for ids in prompts(own, LENGTHS)]
    together = own.model.forward(spans, **wanted)
    solo = [own.model.forward([span], **wanted) for span in alone]
    assert same_bits(together.logits, torch.cat([output.logits for output in solo]))
    if own.config.draft is not None:
        assert same_bits(together.taps, torch.cat([output.taps for output in solo]))
    for step in range(4):
        token = np.array([step * 7 + 3])
        spans, alone = ([Span(span.state, token, decoder_rows=1) for span in some] for some in (spans, alone))
        together = own.model.forward(spans)
        assert same_bits(together.logits, torch.cat([own.model.forward([span]).logits for span in alone]))
    for left, right in zip(spans, alone, strict=True):
        assert differing(state_bits(own.model, left), state_bits(own.model, right)) == []


def test_a_batch_of_the_golden_model_equals_solo_runs() -> None:
    model, ids = golden_model(), golden_ids()
    spans = [whole_span(model, ids[:length]) for length in LENGTHS]
    together = model.forward(spans, wants_all_logits=True).logits
    solo = [model.forward([whole_span(model, ids[:length])], wants_all_logits=True).logits for length in LENGTHS]
    assert same_bits(together, torch.cat(solo))


def test_a_batch_with_images_equals_solo_runs() -> None:
    model, (ids, images) = golden_model(), golden_images()

    def spans() -> list[Span]:
        pictured = Span(model.new_state(), ids, len(ids), images=images.slice(0, len(ids)))
        tail = Span(model.new_state(), ids[7:], len(ids) - 7, images=images.slice(7, len(ids)))
        return [whole_span(model, golden_ids()[:9]), pictured, tail, whole_span(model, golden_ids()[:20], "replay")]

    together = model.forward(spans(), wants_all_logits=True).logits
    solo = [model.forward([span], wants_all_logits=True).logits for span in spans()]
    assert same_bits(together, torch.cat(solo))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", ["three streams", "five streams, no draft", "pairs in the decoder"])
def test_any_schedule_of_steps_gives_the_logits_of_solo_runs(shape: str, seed: int) -> None:
    """Every step takes some of the sequences on by different numbers of tokens."""
    own = synthetic(shape)
    random = np.random.default_rng(seed)
    lengths = random.permutation([12, 40, 23, 31])
    ids = prompts(own, lengths)
    states = [own.model.new_state() for _ in ids]
    done, found = [0] * len(ids), [[] for _ in ids]
    while any(place < len(one) for place, one in zip(done, ids, strict=True)):
        alive = [i for i, one in enumerate(ids) if done[i] < len(one)]
        chosen = random.permutation(alive)[: random.integers(1, len(alive) + 1)]
        steps = [int(min(len(ids[i]) - done[i], random.choice([1, 1, 2, 5, 9, 16]))) for i in chosen]
        spans = [Span(states[i], ids[i][done[i] : done[i] + n], n) for i, n in zip(chosen, steps, strict=True)]
        logits = own.model.forward(spans, wants_all_logits=True).logits.split(steps)
        for i, n, rows in zip(chosen, steps, logits, strict=True):
            found[i].append(rows)
            done[i] += n
    for one, rows in zip(ids, found, strict=True):
        whole = own.model.forward([whole_span(own.model, one)], wants_all_logits=True).logits
        assert same_bits(torch.cat(rows), whole)


def test_replayed_prompts_inner_chunks_and_decoding_share_a_step() -> None:
    own = synthetic("three streams")
    first, second, third = prompts(own, (30, 21, 26))

    def run_all(is_together: bool) -> list[Tensor]:
        decoding = whole_span(own.model, first, "replay")
        own.model.forward([decoding])
        inner = Span(own.model.new_state(), second[:9], decoder_rows=0)
        spans = [Span(decoding.state, first[:1], 1), inner, whole_span(own.model, third, "replay")]
        if is_together:
            decoded, replayed = own.model.forward(spans).logits
        else:
            decoded, nothing, replayed = (own.model.forward([span]).logits for span in spans)
            assert nothing.shape[0] == 0
        last = own.model.forward([Span(inner.state, second[9:], own.config.window, is_replay=True)]).logits
        return [decoded.reshape(-1), replayed.reshape(-1), last.reshape(-1)]

    for left, right in zip(run_all(True), run_all(False), strict=True):
        assert same_bits(left, right)


# ------------------------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("back", [1, 2, 5, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["three streams", "n-grams and taps on both sides of the cut"])
def test_tokens_that_are_taken_back_leave_no_trace(shape: str, mode: Mode, back: int) -> None:
    own = synthetic(shape)
    drafter = Drafter(own.config, own.model.parameters, own.model.frequencies.plain)
    prompt, rejected, accepted = own.ids(29), own.ids(back, seed=1), own.ids(6, seed=2)

    def start() -> Span:
        span = whole_span(own.model, prompt, mode)
        observe(span)
        return span

    def observe(span: Span) -> Tensor:
        output = own.model.forward([span], wants_taps=True)
        drafter.observe(span.state, span.state.length - len(output.taps), output.taps)
        return output.logits

    never, undone = start(), start()
    observe(Span(undone.state, rejected, back))
    undone.state.rollback(len(prompt))
    assert differing(state_bits(own.model, undone), state_bits(own.model, never)) == []
    for token_id in accepted:
        logits = [observe(Span(one.state, np.array([token_id]), 1)) for one in (never, undone)]
        assert same_bits(*logits)
        drafts = [drafter.propose(one.state, int(token_id)) for one in (never, undone)]
        assert same_bits(drafts[0].logits, drafts[1].logits)
    assert differing(state_bits(own.model, undone), state_bits(own.model, never)) == []
