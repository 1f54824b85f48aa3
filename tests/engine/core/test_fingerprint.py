"""What tells checkpoints apart on disk: content, not the names and times of files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from headrace.core.shipped import shipped_model
from headrace.engine.core.build import fingerprint


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(shipped_model(), folder)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    return folder


def test_a_copy_is_the_same_checkpoint(copied: Path) -> None:
    assert fingerprint(copied) == fingerprint(shipped_model())


@pytest.mark.parametrize("what", ["weights", "config", "tokenizer"])
def test_other_content_is_another(what: str, copied: Path) -> None:
    file = copied / {"weights": "model.safetensors", "config": "config.json", "tokenizer": "tokenizer.json"}[what]
    if what == "weights":
        size = file.stat().st_size
        with file.open("r+b") as opened:  # a training changes a tensor throughout
            opened.seek(size // 2)
            part = opened.read(size // 4)
            opened.seek(size // 2)
            opened.write(bytes(byte ^ 1 for byte in part))
    else:
        file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    before, after = fingerprint(shipped_model()), fingerprint(copied)
    assert {name for name in before if before[name] != after[name]} == {what}
