"""Reads the token ids of one sequence from a JSON file."""

from pathlib import Path

import numpy as np

from headrace.core.errors import UserError
from headrace.core.strict_json import read_json

_MAX_FILE_BYTES = 64 << 20


def read_token_ids(path: Path) -> np.ndarray:
    """Return the ids of a JSON list, [N] int64.

    Raises:
        UserError: the file is not a JSON list of at least one whole number from 0 up.
    """
    listed = read_json(path, max_bytes=_MAX_FILE_BYTES)
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{path} does not hold a list of token ids; a JSON list of whole numbers is accepted.")
    for index, token_id in enumerate(listed):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise UserError(f"{path} has {token_id!r} at index {index}; whole numbers are accepted as token ids.")
        if not 0 <= token_id < 2**31:
            raise UserError(f"{path} has token id {token_id} at index {index}; ids from 0 up are accepted.")
    return np.array(listed, dtype=np.int64)
