"""`cusearch config [CONFIG]`: prints every setting, its value and its meaning, or with --schema the JSON schema."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cusearch_async.cli.parts.arguments import add_config, refuse_settings_of_nothing
from cusearch_async.config import Config, Extensible, load_config, scope_in, section_of

WIDTH = 120


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, without="the defaults")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a config, for editors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    refuse_settings_of_nothing(arguments, overrides)
    if arguments.schema:
        print(json.dumps(schema(), indent=1, ensure_ascii=False))
        return
    print(reference(load_config(arguments.config, overrides) if arguments.config else None), end="")


def schema() -> dict[str, Any]:
    """Draft 2020-12. It has keys, types and ranges. Rules between several keys are checked only by `cusearch check`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def reference(config: Config | None) -> str:
    """All settings, section by section, with the values of `config`, or the defaults."""
    return "\n".join(_section(Config, "", config)).lstrip()


def _section(model: type[BaseModel], name: str, values: BaseModel | None) -> Iterator[str]:
    inner = []
    for key, field, value in _keys(model, values):
        path = f"{name}.{key}" if name else key
        kind, label = section_of(field)
        if kind is None:
            shown = "must be given" if field.is_required() and values is None else f"`{_shown(value)}`"
            scope = scope_in(model, key).value
            line = f"- `{path}` ({shown}, {scope}): {' '.join((field.description or '').split())}"
            yield textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        elif not label:
            inner.append((kind, path, value if values is not None else None))
        elif values is None:
            inner.append((kind, f"{path}.LABEL", None))
        else:
            inner += [(kind, f"{path}.{label}", labelled) for label, labelled in value.items()]
    for kind, path, value in inner:
        yield f"\n### {path}\n"
        yield from _section(kind, path, value)
    if not name:
        yield ""


def _keys(model: type[BaseModel], values: BaseModel | None) -> Iterator[tuple[str, FieldInfo, Any]]:
    """The keys of a section with their values, or with their defaults. For a named method or environment: its own
    settings, and not those of other methods or environments."""
    others = values.registered() if isinstance(values, Extensible) else set()
    for key, field in model.model_fields.items():
        if key not in others:
            yield key, field, field.get_default() if values is None else getattr(values, key)
    if isinstance(values, Extensible):
        for key, field in type(values.own).model_fields.items():
            yield key, field, getattr(values.own, key)


def _shown(value: Any) -> str:
    """The value as TOML writes it."""
    if value is None or value == math.inf:
        return "none" if value is None else "inf"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
