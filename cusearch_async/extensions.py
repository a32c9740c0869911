"""What users bring of their own: Python names in the config, `package.module:Name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from cusearch_async.errors import ConfigError

T = TypeVar("T")


def load(key: str, reference: str, kind: type[T], known: Collection[str]) -> type[T]:
    """The class that the config's `key` refers to, a subclass of `kind`. `known` are the names without a module.

    Modules are looked for where Python looks, and last in the folder that the process was started in.
    Raises: ConfigError for what is no such reference or cannot be imported."""
    found = _import(key, reference, known)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(
            f"{key}: {reference!r} must be a subclass of {kind.__module__}.{kind.__name__}, got {found!r}"
        )
    return found


def load_function(key: str, reference: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """The function that the config's `key` refers to; as for `load`."""
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
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{key}: module {module!r} of {reference!r} cannot be imported ({error})") from error
    except AttributeError as error:
        raise ConfigError(f"{key}: module {module!r} has no {name!r}") from error
