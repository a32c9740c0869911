"""Guards of the pure parts: shapes and modes that cannot be meant are refused, where broadcasting would hide them."""

from __future__ import annotations

from typing import Any, Protocol, get_args


class HasShape(Protocol):
    @property
    def shape(self) -> Any: ...


def require_vectors(length: int, **values: HasShape | None) -> None:
    """Raises: ValueError naming the first of `values` whose shape is not [length]. None is passed over."""
    for name, value in values.items():
        if value is not None and tuple(value.shape) != (length,):
            raise ValueError(f"{name} must have shape [{length}], got {list(value.shape)}")


def require_mode(name: str, value: str, kind: Any) -> None:
    """Raises: ValueError when `value` is none of the words of `kind`, a Literal."""
    known = get_args(kind)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
