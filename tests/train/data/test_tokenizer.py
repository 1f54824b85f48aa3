"""Trained vocabularies: fixed ids, exact size, every text there and back, the same bytes in every run."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer
from headrace.train.data import special_tokens
from headrace.train.data.tokenizer import token_bytes, train_vocabulary
from tests.train.data.small import TEXTS, encoder, tokenizer, vocabulary

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
HASH = (
    "import hashlib; from tests.train.data.small import vocabulary; "
    "print(hashlib.sha256(vocabulary().document.encode()).hexdigest())"
)


def test_the_size_is_exact_and_no_id_is_missing() -> None:
    trained = vocabulary()
    assert trained.size == tokenizer().size == 400
    assert all(tokenizer().id_to_token(token_id) is not None for token_id in range(400))
    assert trained.num_merges == 400 - 256 - 40 - len(special_tokens.ALL)
    assert trained.num_fillers == 0


def test_missing_merges_are_filled_with_reserved_tokens() -> None:
    trained = train_vocabulary(["abab"], 400, num_reserved=3)
    loaded = Tokenizer.from_text(trained.document)
    assert loaded.size == 400
    assert trained.num_merges == 1
    assert trained.num_fillers == 400 - 256 - 3 - len(special_tokens.ALL) - 1
    last = special_tokens.reserved_token(3 + trained.num_fillers - 1)
    assert loaded.encode(f"ab{last}") == [loaded.token_to_id("ab"), 399]


def test_special_tokens_are_single_ids_in_their_fixed_order() -> None:
    for token_id, token in enumerate(special_tokens.ALL):
        assert tokenizer().encode(token) == [token_id]
        assert tokenizer().is_special(token_id) == (token not in special_tokens.SHOWN)
    for index in range(40):
        reserved = special_tokens.reserved_token(index)
        assert tokenizer().encode(reserved) == [special_tokens.FIRST_RESERVED_ID + index]
    begin = [special_tokens.BEGIN, special_tokens.END, special_tokens.PAD]
    assert [tokenizer().token_to_id(token) for token in begin] == [0, 1, 2]


def test_special_tokens_are_spelled_as_the_chat_encoding_spells_them() -> None:
    wanted = (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜System｜> <｜User｜> <｜Assistant｜> <think> </think> "
        "<｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜> "
        "<｜deepseek_image｜> ｜DSML｜ <tool_result> </tool_result>"
    )
    assert set(wanted.split()) <= set(special_tokens.ALL)
    assert len(set(special_tokens.ALL)) == len(special_tokens.ALL)


def test_the_vendors_chat_encoder_finds_every_token_of_a_text_chat_under_one_id() -> None:
    """Held against the package `deepseek-recipe` where it is installed; tokens of images are outside a text chat."""
    recipe = pytest.importorskip("deepseek_recipe", reason="the vendor's chat encoder is not installed")
    kinds = recipe.SpecialToken
    text = ("Bos", "Eos", "ThinkingStart", "ThinkingEnd", "System", "User", "Assistant", "LatestReminder", "Dsml")
    spellings = [getattr(kinds, kind).default_str() for kind in text]
    theirs = recipe.Tokenizer.from_str(vocabulary().document)
    assert all(theirs.encode(spelling) == tokenizer().encode(spelling) for spelling in spellings)
    assert [len(tokenizer().encode(spelling)) for spelling in spellings] == [1] * len(spellings)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = recipe.ChatCompletionRequest(
        {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}],
        }
    )
    chat = request.convert(recipe.ConversionOptions()).conversation
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(theirs)
    ids = encoding.encode(chat)
    assert tokenizer().decode(ids, skip_special_tokens=False) == encoding.render_conversation(chat).prompt
    found = [tokenizer().id_to_token(token_id) for token_id in ids if token_id < special_tokens.FIRST_RESERVED_ID]
    assert found.count(special_tokens.DSML) >= 6
    assert {special_tokens.BEGIN, special_tokens.SYSTEM, special_tokens.USER, special_tokens.THINK} <= set(found)


@given(UNICODE)
def test_any_text_comes_back(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text)) == text
    assert tokenizer().decode(encoder().plain([text])[0]) == text


@given(st.binary(max_size=40))
def test_any_bytes_can_be_written_as_ids(data: bytes) -> None:
    """Bytes that are no UTF-8 cannot be a text, so their ids are looked up one by one."""
    ids = [byte_ids()[byte] for byte in data]
    assert len(set(byte_ids())) == 256
    assert tokenizer().decode(ids) == data.decode("utf-8", "replace")


def byte_ids() -> list[int]:
    """The id of each byte: the order of ids is that of the characters that stand for the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    characters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    found = [tokenizer().token_to_id(character) for character in characters]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


def test_digits_are_single_tokens() -> None:
    trained = train_vocabulary(["x = 1234567\n" * 50, "12 1234"], 380, num_reserved=0)
    loaded = Tokenizer.from_text(trained.document)
    assert [loaded.decode([token_id]) for token_id in loaded.encode("1234567")] == list("1234567")


@given(UNICODE)
def test_token_bytes_add_up_to_the_bytes_of_a_text(text: str) -> None:
    lengths = token_bytes(tokenizer())
    assert lengths[encoder().plain([text])[0]].sum() == len(text.encode())
    assert (lengths[: special_tokens.FIRST_RESERVED_ID + 40] == 0).all()


@pytest.mark.parametrize(("hash_seed", "threads"), [("0", "1"), ("77", "2")])
def test_the_same_texts_give_the_same_bytes_in_every_process(hash_seed: str, threads: str) -> None:
    environment = {
        **os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", HASH], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.strip() == hashlib.sha256(vocabulary().document.encode()).hexdigest()


def test_the_number_of_ngram_classes_is_that_of_the_saved_file(tmp_path: Path) -> None:
    file = vocabulary().save(tmp_path / "out")
    _, num_classes = build_token_map(Tokenizer.from_file(tmp_path / "out"))
    assert file.name == "tokenizer.json"
    assert vocabulary().num_classes == num_classes
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=r"tokenizer file .* cannot be written"):
        vocabulary().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_size_without_room_is_refused() -> None:
    smallest = len(special_tokens.ALL) + 5 + 256
    with pytest.raises(UserError, match=f"accepted are {smallest} ids or more"):
        train_vocabulary(TEXTS, smallest - 1, num_reserved=5)
    assert train_vocabulary(TEXTS, smallest, num_reserved=5).num_merges == 0
