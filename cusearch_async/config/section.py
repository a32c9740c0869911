"""What all sections of the config have in common."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must be letters, digits, '_', '.' and '-', the first a letter or digit",
    r"^(cpu|cuda(:\d+)?)$": "must be 'cpu', 'cuda' or 'cuda:N'",
}
"""What a text must match -> the same in words."""
NAME, DEVICE = PATTERNS

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is an integer; a config's `true` is none."""
        kind = cls.model_fields[info.field_name or ""].annotation
        parts = value if isinstance(value, list | tuple) else [value]
        if kind is not bool and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"must not be true or false, got {str(value).lower()}")
        return value


def check_url(url: str, schemes: tuple[str, ...], example: str) -> None:
    """Raises: ValueError naming the address and what one looks like."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError(f"url {url!r} must look like {example}")
