"""The scope of each setting, read from its annotation (`section.Scope`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from cusearch_async.config.messages import section_of
from cusearch_async.config.section import Extensible, Scope
from cusearch_async.config.whole import Config


def scope_of(key: str, section: type[BaseModel] = Config) -> Scope:
    """Of a setting by its dotted key, as `flat` gives it; MEANING for a key that no section knows."""
    name, _, rest = key.partition(".")
    field = section.model_fields.get(name)
    inner, label = section_of(field) if field else (None, "")
    if inner is None:
        return scope_in(section, name)
    return scope_of(rest.partition(".")[2] if label else rest, inner)


def scope_in(section: type[BaseModel], name: str) -> Scope:
    """Of the setting `name` of a section. The own settings of a method or an environment are shared."""
    field = section.model_fields.get(name)
    if issubclass(section, Extensible) and (field is None or name in section.registered()):
        return Scope.SHARED
    given = (item for item in (field.metadata if field else ()) if isinstance(item, Scope))
    return next(given, Scope.MEANING)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting, of settings as TOML has them."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
