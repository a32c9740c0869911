"""The keys of the config: all of them, and the scope of each, read from its annotation (`section.Scope`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cusearch_async.config.section import Extensible, Scope
from cusearch_async.config.whole import Config


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the config, dotted; LABEL stands for a label that the user chooses."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner, label = section_of(field)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.{label}")


def section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """(the section class of a key, None for a plain setting; "LABEL." for a table of labelled sections, else "")."""
    kind, label = field.annotation, ""
    if get_origin(kind) is dict:
        kind, label = get_args(kind)[1], "LABEL."
    return (kind, label) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, "")


def scope_of(key: str) -> Scope:
    """Of a setting by its dotted key, as `flat` gives it; MEANING for an unknown key."""
    return scope_in(*_place_of(key))


def is_text(key: str, value: str) -> bool:
    """Whether the `value` of a command, for a setting by its dotted key, is a text or a path, or a list of them with
    commas: not quoted, and no list as TOML has it."""
    section, name = _place_of(key)
    field = section.model_fields.get(name)
    kinds = _kinds(field.annotation) - {type(None)} if field else set()
    is_one = kinds <= {str, Path}
    marks = ('"', "'") if is_one else ('"', "'", "[")
    return bool(kinds) and (is_one or kinds == {tuple[str, ...]}) and not value.startswith(marks)


def _place_of(key: str, section: type[BaseModel] = Config) -> tuple[type[BaseModel], str]:
    """The section class of a setting, and its name there."""
    name, _, rest = key.partition(".")
    field = section.model_fields.get(name)
    inner, label = section_of(field) if field else (None, "")
    return (section, name) if inner is None else _place_of(rest.partition(".")[2] if label else rest, inner)


def scope_in(section: type[BaseModel], name: str) -> Scope:
    """Of the setting `name` of a section. The own settings of a method or an environment are shared."""
    field = section.model_fields.get(name)
    if issubclass(section, Extensible) and (field is None or name in section.registered()):
        return Scope.SHARED
    given = (item for item in (field.metadata if field else ()) if isinstance(item, Scope))
    return next(given, Scope.MEANING)


def _kinds(annotation: Any) -> set[Any]:
    """The types that a value may have."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for item in get_args(annotation) for kind in _kinds(item)}
    return {annotation}


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting, of settings as TOML has them."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
