"""Temperatures of confidences serve only the weights that they were fitted to."""

import json
from pathlib import Path

import pytest

from headrace.core.errors import UserError
from headrace.core.shipped import shipped_model
from headrace.engine.core.build import build_core
from headrace.engine.core.options import EngineOptions
from headrace.engine.drafting.temperatures import TEMPERATURES_NAME


def test_temperatures_of_other_weights_are_refused(tmp_path: Path) -> None:
    for file in shipped_model().iterdir():
        if file.name != TEMPERATURES_NAME:
            (tmp_path / file.name).symlink_to(file)
    found = json.loads((shipped_model() / TEMPERATURES_NAME).read_text())
    (tmp_path / TEMPERATURES_NAME).write_text(json.dumps(found | {"weights": "0" * 32}))
    with pytest.raises(UserError, match="weights"):
        build_core(tmp_path, EngineOptions(drafting="always", num_slots=1), None, None)
