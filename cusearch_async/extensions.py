"""Loads the users' own classes and functions: Python names in the config, `package.module:Name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from cusearch_async.errors import ConfigError

T = TypeVar("T")


def as_list(value: Any) -> Any:
    """The value of a list setting, which may be a list, one value, or text with commas: 0,1 is [0, 1].

    Raises: ValueError for text with an empty item, or with half of the brackets or quotes."""
    if not isinstance(value, str):
        return value if isinstance(value, list | tuple | dict) else (value,)
    parts = [part.strip() for part in value.split(",")] if value.strip() else []
    if not all(part and part.strip("[]\"'") == part for part in parts):
        raise ValueError(f'must be a list, like ["a", "b"] or a,b, got {value!r}')
    return tuple(parts)


Names = Annotated[tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | tuple[str, ...])]
"""A list of texts; see `as_list`."""


def refuse_unsplit(command: Sequence[str], example: str) -> None:
    """Raises: ValueError for a program and its arguments in one word; a path may have blanks, and be of another
    machine."""
    program, blank, _ = command[0].partition(" ") if command else ("", "", "")
    if blank and "/" not in program:
        raise ValueError(f"{command[0]!r} is no program; separate its arguments by commas, as in {example}")


class Settings(BaseModel):
    """Settings from a config, ours or a user's own."""

    model_config = ConfigDict(
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # in tables of other libraries' options
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """The text `none` leaves a setting out that may be: TOML has no word for it, and a later file needs one."""
        is_left_out = value == "none" and type(None) in get_args(cls.model_fields[info.field_name or ""].annotation)
        return None if is_left_out else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number: Python's True is an integer, but in a config it is a mistake."""
        kind = cls.model_fields[info.field_name or ""].annotation
        parts = value if isinstance(value, list | tuple) else [value]
        if not _may_be_boolean(kind) and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"must not be true or false, got {str(value).lower()}")
        return value


def _may_be_boolean(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_may_be_boolean, get_args(annotation)))


def load(key: str, reference: str, kind: type[T], known: Collection[str]) -> type[T]:
    """The class that the setting `key` names, a subclass of `kind`. `known` are the built-in names, which have no
    module.

    Modules are searched on Python's path, and last in the working directory of the process.
    Raises: ConfigError for a wrong reference, or one that cannot be imported."""
    found = _import(key, reference, known)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(
            f"{key}: {reference!r} must be a subclass of {kind.__module__}.{kind.__name__}, got {found!r}"
        )
    return found


def load_function(key: str, reference: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """The function that the setting `key` names; as in `load`."""
    found = _import(key, reference, known)
    if not callable(found):
        raise ConfigError(f"{key}: {reference!r} must be a function, got {found!r}")
    return found  # type: ignore[no-any-return]


def _import(key: str, reference: str, known: Collection[str]) -> Any:
    module, colon, name = reference.partition(":")
    if not colon:
        registered = f"use one of {', '.join(known)}, or your own as" if known else "write it as"
        raise ConfigError(f"{key} {reference!r} is unknown; {registered} package.module:Name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may be a script
        reason = f"{type(error).__name__}: {error}"
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        remedy = f"; it is looked for where Python looks, and in the current folder, {here}" if is_missing else ""
        raise ConfigError(f"{key}: module {module!r} of {reference!r} cannot be imported ({reason}){remedy}") from error
    if not hasattr(found, name):
        place = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), "built into Python")
        raise ConfigError(f"{key}: module {module!r} has no {name!r}; the module is {place}")
    return getattr(found, name)
