"""What all request bodies share."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """A request's body: values are taken as they are, never converted, and unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Take a field that is null as one that was left out, known or not."""
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data
