"""What no source file may contain, and what each must."""

import ast

import pytest

from tests.architecture.tree import PACKAGE, name_of, package_files, parse

VAGUE_NAMES = {"utils", "util", "misc", "common", "helpers", "helper", "base", "impl"}


def test_no_module_or_package_has_a_vague_name() -> None:
    named = [path for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.is_dir()]
    assert [name_of(path) for path in named if path.stem in VAGUE_NAMES] == []


def test_the_package_uses_no_assert_statement() -> None:
    """`python -O` removes asserts, and a user's mistake must give a sentence, not a traceback."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_every_module_of_the_package_says_what_it_is() -> None:
    silent = [name_of(path) for path in package_files() if ast.get_docstring(parse(path)) is None]
    assert silent == []


def test_every_public_class_and_function_of_the_package_has_a_docstring() -> None:
    silent = [
        f"{name_of(path)}:{node.name}"
        for path in package_files()
        for node in parse(path).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert silent == []


@pytest.mark.parametrize("name", ["print", "breakpoint", "exit", "input"])
def test_only_commands_talk_to_the_terminal(name: str) -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in package_files()
        if PACKAGE / "cli" not in path.parents
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    assert found == []


def test_no_module_is_a_package_without_an_init_file() -> None:
    folders = {path.parent for path in package_files()}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
