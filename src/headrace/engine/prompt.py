"""The forms in which prompts and parameters may be given."""

from collections.abc import Sequence

import numpy as np

from headrace.core.errors import UserError
from headrace.engine.images import ImagePrompt
from headrace.engine.sampling.params import SamplingParams

Prompt = str | Sequence[int] | ImagePrompt


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or many prompts as a list.

    Raises:
        UserError: there is none, or ids and whole prompts are mixed, or it is nothing of the kind.
    """
    if isinstance(prompts, str | ImagePrompt):
        return [prompts]
    many: list[Prompt] = []
    ids: list[int] = []
    try:
        items = list(prompts)
    except TypeError:
        raise UserError(
            f"the prompt is {prompts!r}; accepted is text, a list of token ids, or a list of those", param="prompts"
        ) from None
    for item in items:
        if isinstance(item, int | np.integer):
            ids.append(int(item))
        else:
            many.append(item)
    if ids and many:
        raise UserError(
            "the prompts mix token ids and whole prompts; one list of ids, or a list of prompts, is accepted"
        )
    if not ids and not many:
        raise UserError("no prompt was given; text or at least one token id is needed", param="prompts")
    return [ids] if ids else many


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return one set of parameters per prompt.

    Raises:
        UserError: there are more or fewer.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{len(params)} sampling parameters were given for {count} prompts", param="params")
    return list(params)


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> list[int]:
    """Return token ids as a list.

    Raises:
        UserError: one is no whole number, or not in the vocabulary.
    """
    try:
        found = list(ids)
    except TypeError:
        raise UserError(f"a prompt is {ids!r}; accepted is text or a list of token ids", param=param) from None
    for index, token_id in enumerate(found):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise UserError(f"token id {token_id!r} at index {index} is not a whole number", param=param)
        if not 0 <= token_id < vocab_size:
            raise UserError(
                f"token id {token_id} at index {index} is not in the vocabulary; accepted are 0 to {vocab_size - 1}",
                param=param,
            )
    return [int(token_id) for token_id in found]
