"""`cusearch config [CONFIG]`: every setting, its value and what it means; docs/configuration.md ends with the same."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cusearch_async.config import CONFIG_HELP, Config, load_config

WIDTH = 120


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", help=f"{CONFIG_HELP}; without it, the defaults")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.config is None:
        print(reference(None), end="")
    else:
        print(reference(load_config(arguments.config, overrides)), end="")


def reference(config: Config | None) -> str:
    """All settings, section by section, with the values of `config`, or the defaults."""
    return "\n".join(_section(Config, "", config)).lstrip()


def _section(model: type[BaseModel], name: str, values: BaseModel | None) -> Iterator[str]:
    inner = []
    for key, field in model.model_fields.items():
        kind = field.annotation
        value = getattr(values, key) if values is not None else field.get_default()
        path = f"{name}.{key}" if name else key
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner.append((kind, path, value if values is not None else None))
            continue
        shown = "must be given" if field.is_required() and values is None else f"`{_shown(value)}`"
        line = f"- `{path}` ({shown}): {' '.join((field.description or '').split())}"
        yield textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    for kind, path, value in inner:
        yield f"\n### {path}\n"
        yield from _section(kind, path, value)
    if not name:
        yield ""


def _shown(value: Any) -> str:
    """As TOML has it."""
    return "none" if value is None else json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
