import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import UserError
from headrace.text.synthetic import make_tokenizer, tokenizer_bytes
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer

SPECIALS = {"<image>": 299, "<eos>": 1, "<bos>": 0, "<pad>": 2}
TEXT = "Hello, the WORLD!\n\n  tabs\tand <eos> ünï 你好 \U0001f600"


def load(document: dict) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_bytes(document).decode()))


@given(st.data())
def test_any_size_and_number_of_classes_is_met_exactly(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    num_classes = data.draw(st.integers(1, size))
    ids = data.draw(st.lists(st.integers(0, 700), min_size=4, max_size=4))
    tokenizer = load(make_tokenizer(size, num_classes, dict(zip(SPECIALS, ids, strict=True))))
    assert tokenizer.size == size
    assert build_token_map(tokenizer)[1] == num_classes


@pytest.mark.parametrize(
    ("size", "num_classes"), [(129_280, 99_092), (100_000, 300), (3000, 2971), (256, 227), (512, 256), (1000, None)]
)
def test_with_room_for_every_byte_any_text_goes_through(size: int, num_classes: int | None) -> None:
    tokenizer = load(make_tokenizer(size, num_classes, {}))
    assert tokenizer.size == size
    assert num_classes is None or build_token_map(tokenizer)[1] == num_classes
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_words_are_longer_than_a_byte_and_all_ids_can_be_reached() -> None:
    tokenizer = load(make_tokenizer(5000, 4000, {}))
    assert len(tokenizer.encode("the other station")) < len("the other station")
    texts = tokenizer.decode_each()
    unreached = [text for i, text in enumerate(texts) if "\ufffd" not in text and tokenizer.encode(text) != [i]]
    assert unreached == []


def test_special_tokens_stand_at_their_ids() -> None:
    tokenizer = load(make_tokenizer(320, 280, SPECIALS))
    for token, token_id in SPECIALS.items():
        assert tokenizer.token_to_id(token) == token_id
        assert tokenizer.is_special(token_id)
        assert tokenizer.encode(f"a{token}b")[1] == token_id


def test_special_tokens_give_way_where_there_is_no_room() -> None:
    tokenizer = load(make_tokenizer(258, 229, SPECIALS | {"<image>": 257}))
    assert tokenizer.is_special(257)
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(0)
    same = load(make_tokenizer(300, 260, {"<eos>": 5, "<pad>": 5}))
    assert same.id_to_token(5) == "<eos>"
    assert same.token_to_id("<pad>") is None


def test_a_small_vocabulary_knows_its_words() -> None:
    tokenizer = load(make_tokenizer(6, 3, {}))
    assert [tokenizer.id_to_token(token_id) for token_id in range(6)] == ["w0", " W0", "w1", " W1", "w2", " W2"]
    assert tokenizer.encode("w1") == [2]


@pytest.mark.parametrize("num_classes", [0, 11])
def test_more_classes_than_entries_are_refused(num_classes: int) -> None:
    with pytest.raises(UserError, match=f"10 entries cannot have {num_classes} classes; 1 to 10"):
        make_tokenizer(10, num_classes, {})


def test_the_same_arguments_give_the_same_bytes() -> None:
    first, second = (tokenizer_bytes(make_tokenizer(900, 700, SPECIALS)) for _ in range(2))
    assert first == second
    assert json.loads(first)["model"]["type"] == "BPE"
