"""A small random checkpoint to judge: every mechanism, a trained vocabulary with reserved ids, held-out text."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from headrace.evaluate.held_out import HeldOut, read_held_out
from headrace.evaluate.settings import Settings
from headrace.evaluate.subject import Subject, load_subject
from headrace.models.deepseek_v41.config import Config
from headrace.train.data.tokenizer import Vocabulary, train_vocabulary
from headrace.train.export import export_masters
from tests.factories import tiny_config
from tests.train.graphs import MICRO, lively_masters

SETTINGS = Settings(
    rows=3,
    lengths=(128, 200),
    num_keys=6,
    num_values=5,
    num_pairs=5,
    num_queries=7,
    piece_tokens=90,
    draft_prompt_tokens=30,
    draft_tokens=14,
)
SEED = 3
NUM_RESERVED = 41  # 6 x 5 pairs, 6 queries, 5 values


def texts(count: int = 6) -> list[str]:
    """Return short programs that share their words."""
    return [
        "\n".join(
            f"def turn_{index}_{place}(wheel, water=0):\n    return wheel + {place * index} - water"
            for place in range(3 + index)
        )
        for index in range(count)
    ]


def vocabulary() -> Vocabulary:
    """Return a vocabulary of 400 ids."""
    return train_vocabulary(texts(), 400, NUM_RESERVED)


def small_config(num_classes: int, *, draft: bool = True, engram: bool = True) -> Config:
    """Return 7 layers and 2 draft layers with a window of 8."""
    changes = {
        **MICRO,
        "vocab_size": 400,
        "engram_compressed_vocab_size": num_classes,
        "engram_pad_token_id": 2,
    }
    return tiny_config(2, vision=False, draft=draft, engram=engram, **changes)


def write_subject(folder: Path, *, draft: bool = True, engram: bool = True) -> Path:
    """Write the checkpoint and its held-out text, `held.jsonl` beside it; return the checkpoint's folder."""
    words = vocabulary()
    masters = lively_masters(small_config(words.num_classes, draft=draft, engram=engram), SEED)
    export_masters(masters, folder / "small", words.document.encode())
    lines = [
        json.dumps({"name": f"wheel{index}.py", "licence": "MIT", "text": text}) for index, text in enumerate(texts())
    ]
    (folder / "held.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "small"


@cache
def subject_folder() -> Path:
    """Return the folder of a shared checkpoint, never changed."""
    return write_subject(Path(mkdtemp()))


@cache
def small_subject() -> Subject:
    """Return the shared checkpoint, loaded."""
    return load_subject(subject_folder())


@cache
def small_held_out() -> HeldOut:
    """Return the shared held-out text."""
    return read_held_out(subject_folder().parent / "held.jsonl", small_subject().encoder)
