"""A run of the shipped model gives what the arithmetic says of its configuration."""

import pytest

from headrace.core.errors import UserError
from headrace.core.shipped import shipped_model
from headrace.plan.ledger.figures import ledger, shipped_models
from headrace.plan.measure import measure


def check(tokens: int) -> dict[str, float]:
    live = measure(shipped_model(), tokens)
    promised = {figure.key for figure in ledger(shipped_models()) if figure.measured_by}
    assert set(live) == promised
    for key, one in live.items():
        assert one.measured == pytest.approx(one.arithmetic, rel=1e-12), f"{key}: {one.how}"
    return {key: one.measured for key, one in live.items()}


def test_counters_of_a_run_equal_the_arithmetic() -> None:
    measured = check(640)
    assert measured["prefill-saving"] == pytest.approx(6 * 640 / (3 * 640 + 3 * 128))
    assert measured["index-saving"] > 0  # the prompt is longer than the candidate pool
    assert measured["deepseek-v4.1-flash-recompute"] == 128


@pytest.mark.full
def test_a_prompt_of_ten_thousand_tokens_saves_what_the_report_says() -> None:
    """headrace-nano has half its layers in the encoder and the released window, so the ratio is the same."""
    assert f"{check(10_000)['prefill-saving']:.4f}" == "1.9747"


@pytest.mark.parametrize("tokens", [1, 256, 10**9])
def test_prompts_that_cannot_be_measured_are_refused_before_loading(tokens: int) -> None:
    with pytest.raises(UserError, match=f"--tokens is {tokens}; 257 to"):
        measure(shipped_model(), tokens)
