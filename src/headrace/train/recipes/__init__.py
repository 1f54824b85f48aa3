"""Recipes by name, and recipes from files.

Each is a function that returns a frozen `Recipe`, or a `DraftRecipe` that trains drafts on a frozen backbone. Derive
your own from one of them with `dataclasses.replace`, in a `.py` file with a function `recipe()`, or write it down as
`.json`; `headrace train NAME --show` prints one to start from.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from headrace.core.errors import UserError
from headrace.core.strict_json import read_json
from headrace.train.draft_recipe import DraftRecipe
from headrace.train.recipe import Recipe
from headrace.train.recipe_json import from_json
from headrace.train.recipes.micro import micro, micro_window_only
from headrace.train.recipes.micro_draft import micro_draft
from headrace.train.recipes.nano import nano
from headrace.train.recipes.nano_draft import nano_draft
from headrace.train.recipes.published import v4_flash, v4_pro, v41_flash
from headrace.train.recipes.tiny_v4 import tiny_v4
from headrace.train.recipes.tiny_v41 import tiny_v41

RECIPES: dict[str, Callable[[], Recipe | DraftRecipe]] = {
    "micro": micro,
    "micro-draft": micro_draft,
    "micro-window-only": micro_window_only,
    "nano": nano,
    "nano-draft": nano_draft,
    "tiny-v4": tiny_v4,
    "tiny-v41": tiny_v41,
    "v4-flash": v4_flash,
    "v4-pro": v4_pro,
    "v4.1-flash": v41_flash,
}
_MAX_BYTES = 16 * 2**20


def load_recipe(name: str) -> Recipe | DraftRecipe:
    """Return the recipe of a name, of a `.json` file, or of the function `recipe()` in a `.py` file.

    Raises:
        UserError: there is no such recipe, the file cannot be read or run, or the recipe refuses a value.
    """
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    if path.suffix == ".json":
        return from_json(read_json(path, max_bytes=_MAX_BYTES), str(path))
    if path.suffix == ".py":
        return _from_python(path)
    raise UserError(
        f"recipe {name!r} is unknown; {', '.join(sorted(RECIPES))}, a .json file or a .py file is accepted.",
        param="recipe",
    )


def _from_python(path: Path) -> Recipe | DraftRecipe:
    if not path.is_file():
        raise UserError(f"recipe file {path} does not exist.", param="recipe")
    spec = importlib.util.spec_from_file_location("headrace_user_recipe", path)
    if spec is None or spec.loader is None:
        raise UserError(f"recipe file {path} is no Python file.", param="recipe")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look their module up
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "recipe", None)
        if not callable(make):
            raise UserError(f"recipe file {path} has no function recipe(); one is accepted.", param="recipe")
        made = make()
    except UserError:
        raise
    except Exception as problem:
        what = " ".join(str(problem).split()) or "no message"
        raise UserError(f"recipe file {path} failed: {type(problem).__name__}: {what}.", param="recipe") from problem
    if not isinstance(made, (Recipe, DraftRecipe)):
        raise UserError(
            f"recipe() of {path} returned a {type(made).__name__}; a Recipe or DraftRecipe is accepted.", param="recipe"
        )
    return made
