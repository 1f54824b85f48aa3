"""Fields that all conversations accept beside those of their dialect."""

from collections.abc import Collection
from typing import Any

from pydantic import Field

from headrace.core.errors import UserError
from headrace.server.schemas.body import Body


def listed(roles: Collection[str], example: str) -> dict[str, Any]:
    """Return what the OpenAPI document says of the messages in a list."""
    content = {"anyOf": [{"type": "string", "example": example}, {"type": "array", "items": {"type": "object"}}]}
    properties = {"role": {"enum": list(roles)}, "content": content}
    return {"items": {"type": "object", "required": ["role", "content"], "properties": properties}}


class Extensions(Body):
    """What the engine can do and some dialect has no field for."""

    top_k: int | None = Field(None, description="Keep this many of the most probable tokens.")
    min_p: float | None = Field(None, description="Keep tokens at least this fraction as probable as the best one.")
    repetition_penalty: float | None = Field(None, description="Above 1, tokens that came before become less probable.")
    seed: int | None = Field(None, description="The same request with the same seed gives the same answer.")
    logit_bias: dict[str, float] | None = Field(None, description="Added to the logits of tokens, by their id.")
    xray: bool | None = Field(None, description="Keep what every step did, for GET /v1/xray/{id}.")
    cache_salt: str | None = Field(
        None, description="Cached prompts are shared only between requests of the same salt."
    )

    def extra_sampling(self) -> dict[str, Any]:
        """Return these fields as those of `SamplingParams`.

        Raises:
            UserError: the bias names something that is no token id.
        """
        names = ("top_k", "min_p", "repetition_penalty", "seed", "xray")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias:
            found["logit_bias"] = biases(self.logit_bias)
        return found

    def given(self, names: Collection[str]) -> dict[str, Any]:
        """Return the fields of some names that hold something, as plain values."""
        return {name: value for name, value in self.model_dump(include=set(names)).items() if value is not None}


def stops(value: str | list[str] | None) -> list[str]:
    """Return stop strings as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def biases(value: dict[str, float] | None) -> dict[int, float]:
    """Return biases by token id.

    Raises:
        UserError: one names something that is no token id.
    """
    found = {}
    for name, bias in (value or {}).items():
        if not name.isascii() or not name.isdecimal() or len(name) > 9:
            raise UserError(
                f"logit_bias names {name[:40]!r}; accepted are token ids, whole numbers", param="logit_bias"
            )
        found[int(name)] = bias
    return found
