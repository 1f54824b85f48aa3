"""Where the model that ships with the package lies, and the text it was never trained on. Does not load torch."""

from pathlib import Path

from headrace.core.errors import UserError

SHIPPED_MODEL = Path(__file__).resolve().parent.parent / "nano"
HELD_OUT_NAME = "held_out.jsonl"
"""One JSON object a line: `name`, `licence`, `text`; beside the shipped weights."""


def shipped_model() -> Path:
    """Return the folder of the shipped model.

    Raises:
        UserError: this version ships none.
    """
    if not (SHIPPED_MODEL / "config.json").is_file():
        raise UserError(
            f"no model ships with this version ({SHIPPED_MODEL} holds none); a checkpoint folder is accepted.",
            param="path",
        )
    return SHIPPED_MODEL
