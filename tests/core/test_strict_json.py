import pytest

from headrace.core.errors import CheckpointError, UserError
from headrace.core.strict_json import parse_json, read_json


def test_ordinary_documents_are_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}', "it") == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ', "line 1"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "deeply"),
        (b"9" * 10_000, "digits"),
        (b"", "JSON"),
    ],
)
def test_what_json_does_not_allow_is_refused_by_name(text: bytes, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        parse_json(text, "config.json")
    assert caught.value.message.startswith("config.json")


def test_files_are_bounded_and_the_error_class_is_the_callers(tmp_path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[1, 2, 3]")
    assert read_json(file, max_bytes=9) == [1, 2, 3]
    with pytest.raises(CheckpointError, match="longer than the 8 bytes"):
        read_json(file, max_bytes=8, error=CheckpointError)
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "b.json", max_bytes=8)
    with pytest.raises(UserError, match="directory"):
        read_json(tmp_path, max_bytes=8)
