"""No number of threads changes a bit of a trace."""

import pytest
import torch

from headrace.models.deepseek_v41.load import load_model
from headrace.models.deepseek_v41.trace import TraceOptions, trace
from tests.golden_mini import FOLDER, run


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "replay"])
def test_two_and_three_threads_give_the_bits_of_one(mode: str) -> None:
    model = load_model(FOLDER).model
    token_ids = run("text.")["input_ids"][0].numpy()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = trace(model, token_ids, TraceOptions(mode=mode))
        for count in (2, 3):
            torch.set_num_threads(count)
            together = trace(model, token_ids, TraceOptions(mode=mode, chunk=7))
            for name, tensor in alone.items():
                assert torch.equal(tensor.view(torch.uint8), together[name].view(torch.uint8)), name
    finally:
        torch.set_num_threads(threads)
