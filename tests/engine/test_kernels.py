"""An engine on native kernels: named in its answers, chosen by option or environment, refused in one sentence."""

import pytest

from headrace.core.errors import UserError
from headrace.core.shipped import SHIPPED_MODEL
from headrace.engine.core.build import build_core
from headrace.engine.core.options import EngineOptions
from headrace.engine.llm import LLM
from headrace.engine.sampling.params import SamplingParams
from headrace.kernels.native.choice import VARIABLE
from headrace.kernels.native.library import available, why_absent

needs_kernels = pytest.mark.skipif(not available(), reason=f"no native kernels: {why_absent()}")


@needs_kernels
def test_answers_name_the_kernels_that_computed_them() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=1)
    with LLM(kernels="native", threads=1, num_slots=2) as llm:
        assert llm.numerics == "native-bf16idx-2"
        first, second = llm.generate(["def read(", "def read("], params)
    assert first.numerics == "native-bf16idx-2"
    assert first.token_ids == second.token_ids and len(first.token_ids) == 8


@needs_kernels
def test_the_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "native:mhc")
    options = {"threads": 1, "num_slots": 1, "max_context": 512}
    names = [
        build_core(SHIPPED_MODEL, EngineOptions(kernels=kernels, **options), None, None).model.numerics.name
        for kernels in (None, "native:experts,attention", "torch")
    ]
    assert names == ["native:mhc-bf16idx-2", "native:attention,experts-bf16idx-2", "torch-bf16idx-1"]


def test_unknown_kernels_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="kernels are 'fast'; accepted are torch, native, auto") as caught:
        EngineOptions(kernels="fast")
    assert caught.value.param == "kernels"
