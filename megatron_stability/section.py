"""The base of every section of the configuration tree."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

MAX_INT = 2**31 - 1  # beyond any count of steps, samples or threads; a window of more can't be made


class Section(BaseModel):
    """A closed, frozen section of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise ValueError(f"must be at most {MAX_INT}")
        return value
