"""The base of every section of the configuration tree."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

MAX_INT = 2**31 - 1  # beyond any count of steps, samples or threads; a window of more can't be made


class Section(BaseModel):
    """A closed, frozen section of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _over_own_defaults(cls, given: Any) -> Any:
        """A section that is given in part keeps the rest of its own default, which may not be that of its class."""
        if not isinstance(given, dict):
            return given
        found = dict(given)
        for name, info in cls.model_fields.items():
            part = given.get(name)
            if isinstance(part, dict) and isinstance(info.default, Section):
                found[name] = _own(info.default) | part
        return found

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise ValueError(f"must be at most {MAX_INT}")
        return value


def _own(section: Section) -> dict[str, Any]:
    """What makes it another than its class is without a word."""
    blank = type(section)()
    return {
        name: value for name in type(section).model_fields if (value := getattr(section, name)) != getattr(blank, name)
    }
