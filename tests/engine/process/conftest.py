"""One small checkpoint for all tests of processes."""

from pathlib import Path

import pytest

from tests.factories import tiny_checkpoint, tiny_config


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(vision=False, draft=False, max_position_embeddings=2048)
    return tiny_checkpoint(tmp_path_factory.mktemp("process"), config)
