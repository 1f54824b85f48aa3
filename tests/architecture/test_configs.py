"""Every committed configuration is one that the package accepts."""

from pathlib import Path

import pytest

from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.plan import build_plan
from tests.architecture.tree import ROOT, name_of


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=name_of)
def test_committed_configuration_gives_a_layer_plan(path: Path) -> None:
    config = load_config(path)
    assert len(build_plan(config)) == config.num_layers + config.num_draft_layers
