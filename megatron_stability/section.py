"""The base of every section of the configuration tree."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A closed, frozen section of the tree."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
