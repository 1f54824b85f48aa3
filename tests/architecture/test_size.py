"""Files and functions stay short enough to be read in one go."""

import ast

from tests.architecture.tree import code_files, function_lengths, name_of, parse

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in code_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    long = {
        f"{name_of(path)}:{function}": lines
        for path in code_files()
        for function, lines in function_lengths(parse(path)).items()
        if lines > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_function_lengths_count_nested_functions_and_docstrings() -> None:
    source = 'def outer():\n    """One.\n\n    Two.\n    """\n    def inner():\n        return 1\n    return inner\n'
    assert function_lengths(ast.parse(source)) == {"outer@1": 8, "inner@6": 2}
