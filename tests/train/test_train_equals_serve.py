"""The training pass gives the bits of the serving path: whole documents in full mode, segments in replay mode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.model import DeepseekV41
from headrace.train.graph import Document, GraphOptions, Segment, TrainGraph
from headrace.train.quantise import QuantPlan
from tests.traces import SHAPES, same_bits, whole_span
from tests.train.graphs import SERVED, micro_config, served_pair, token_ids, with_quant

DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = (37, 1, 130, 8, 64)
WIDE = "wide window"  # 72 positions
STREAMS_ALREADY = ("three streams", WIDE)  # three and four streams, run in both numerics


def config_of(shape: str) -> Config:
    """Return the micro model of one of `SHAPES`, without draft layers and image tower."""
    left_out = ("draft", "vision", "dspark_target_layer_ids")
    return micro_config(**{name: value for name, value in SHAPES[shape].items() if name not in left_out})


def serve(model: DeepseekV41, ids: np.ndarray) -> Tensor:
    return model.forward([whole_span(model, ids)], wants_all_logits=True).logits


def serve_replayed(model: DeepseekV41, ids: np.ndarray, prompt: int) -> Tensor:
    """Return the logits after a replayed prompt and after every later token, fed one by one."""
    span = whole_span(model, ids[:prompt], "replay")
    rows = [model.forward([span]).logits]
    rows += [model.forward([Span(span.state, ids[p : p + 1], 1)]).logits for p in range(prompt, len(ids))]
    return torch.cat(rows)


@torch.no_grad()
def train(graph: TrainGraph, documents: list[Document], options: GraphOptions) -> Tensor:
    return graph.forward(documents, options).logits()


# -------------------------------------------------------------------------------------------------- whole documents


def check_whole(config: Config, folder: Path, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    graph, model = served_pair(config, folder, dtype)
    documents = [Document(token_ids(count, count)) for count in lengths]
    logits = train(graph, documents, SERVED[dtype])
    assert same_bits(logits, torch.cat([serve(model, document.token_ids) for document in documents]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STREAMS_ALREADY)
def test_documents_get_the_logits_of_serving(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_whole(config_of(shape), tmp_path, dtype, LENGTHS)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in STREAMS_ALREADY])
def test_documents_get_the_logits_of_serving_in_every_shape(shape: str, tmp_path: Path) -> None:
    check_whole(config_of(shape), tmp_path, torch.bfloat16, (37, 70))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_long_documents_get_the_logits_of_serving_in_every_shape(
    shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    check_whole(config_of(shape), tmp_path, dtype, (*LENGTHS, 301))


@pytest.mark.parametrize("flag", [flag for flag in vars(QuantPlan()) if flag != "tables"])
def test_a_quantiser_that_is_off_does_not_give_the_logits_of_serving(flag: str, tmp_path: Path) -> None:
    """Rows of n-gram tables pass the quantiser of inputs, which rounds them to the same grid."""
    graph, model = served_pair(micro_config(), tmp_path, torch.float32)
    ids = token_ids(37)
    options = with_quant(SERVED[torch.float32], **{flag: False})
    assert not same_bits(train(graph, [Document(ids)], options), serve(model, ids))


# ---------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [3, 8, 45])
def test_a_segment_gets_the_logits_of_a_replayed_prompt_and_its_decoding(
    prompt: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Variant B of training.md 5.2: the decoder runs on the prompt's last window and the answer only."""
    graph, model = served_pair(micro_config(), tmp_path, dtype)
    ids, start = token_ids(57), max(0, prompt - graph.config.window)
    logits = train(graph, [Document(ids, (Segment(start, 57, start),))], SERVED[dtype])
    assert same_bits(logits[prompt - 1 - start :], serve_replayed(model, ids, prompt))
    whole = train(graph, [Document(ids)], SERVED[dtype])
    assert same_bits(logits, whole[start:]) == (start == 0)


def test_segments_of_several_turns_each_get_the_logits_of_their_own_prompt(tmp_path: Path) -> None:
    graph, model = served_pair(micro_config(streams=4), tmp_path, torch.bfloat16)
    ids, window = token_ids(80), graph.config.window
    turns = [(20, 31), (35, 50), (66, 80)]  # length of the prompt, end of the answer
    segments = tuple(Segment(prompt - window, end, prompt - window) for prompt, end in turns)
    other = Document(token_ids(19, 3))
    logits = train(graph, [other, Document(ids, segments), other], SERVED[torch.bfloat16])
    parts = logits.split([19, *(segment.high - segment.low for segment in segments), 19])
    for (prompt, end), rows in zip(turns, parts[1:-1], strict=True):
        assert same_bits(rows[window - 1 :], serve_replayed(model, ids[:end], prompt))
    assert same_bits(parts[0], parts[-1])
    assert same_bits(parts[0], serve(model, other.token_ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_over_all_rows_gives_both_modes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Variant A: the rows before the replay's start keep their full windows, those behind it lose them."""
    graph, model = served_pair(micro_config(), tmp_path, dtype)
    ids, prompt = token_ids(57), 45
    start = prompt - graph.config.window
    masked = train(graph, [Document(ids, (Segment(0, start), Segment(start, 57, start)))], SERVED[dtype])
    assert same_bits(masked[:start], serve(model, ids)[:start])
    assert same_bits(masked[prompt - 1 :], serve_replayed(model, ids, prompt))


def test_a_replay_of_everything_is_the_full_mode(tmp_path: Path) -> None:
    graph, model = served_pair(config_of(WIDE), tmp_path, torch.bfloat16)
    ids = token_ids(60)
    logits = train(graph, [Document(ids, (Segment(0, 60),))], SERVED[torch.bfloat16])
    assert same_bits(logits, train(graph, [Document(ids)], SERVED[torch.bfloat16]))
    assert same_bits(logits[50:], serve_replayed(model, ids, 51))
    assert same_bits(logits, serve(model, ids))
