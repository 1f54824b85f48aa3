"""What the architecture tests read: the files of the checkout, parsed once. No test lives here."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headrace"
CODE_FOLDERS = ("src", "tests", "benchmarks", "scripts", "tools")
DOCUMENT_FOLDERS = ("docs", "src", "benchmarks")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def package_files() -> tuple[Path, ...]:
    """Return every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def code_files() -> tuple[Path, ...]:
    """Return every Python file of the project: package, tests, benchmarks, scripts."""
    return tuple(sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")))


@cache
def documents() -> tuple[Path, ...]:
    """Return every Markdown file of the project."""
    nested = [path for folder in DOCUMENT_FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return tuple(sorted([*ROOT.glob("*.md"), *nested]))


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    """Return the path relative to the checkout, for messages."""
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of everything a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def function_lengths(tree: ast.Module) -> dict[str, int]:
    """Return name@line -> number of lines, docstring included, of every function in a syntax tree."""
    return {
        f"{node.name}@{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }
