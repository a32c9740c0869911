"""Which configs may bring code: one that a user names is his own, one in the folder of a run may be somebody else's.

Commands that only look at a run import what such a config names, an environment or a transport, only with `--trust`:
modules are searched in the current folder too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cusearch_async.config.toml import read_toml
from cusearch_async.errors import ConfigError
from cusearch_async.run.folder import MARKER

CODE = (
    "method.name",
    "environment.LABEL.name",
    "environment.LABEL.reward",
    "loss.objective",
    "retriever.backend",
    "retriever.bm25.tokenizer",
    "redis.transport",
)
"""Settings that may be package.module:Name."""


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust", action="store_true", help="import the code that a config in the folder of a run names, if it does"
    )


def refuse_untrusted(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError when a command with `add_trust` would import code that a config in a run's folder names."""
    if getattr(arguments, "trust", True):
        return
    for path in _configs(arguments):
        for key, name in code_in(_read(path)):
            raise ConfigError(
                f"{path} is in the folder of a run and names code, {key} = {name!r}; add --trust to import it, if you "
                "know where the folder comes from"
            )


def code_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, package.module:Name) of all code that a config names; `settings` as read from TOML."""
    for setting in CODE:
        yield from _named(settings, setting.split("."), "")


def _named(section: Any, path: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    if not path:
        if isinstance(section, str) and ":" in section:
            yield prefix.removesuffix("."), section
    elif isinstance(section, Mapping):
        for name in section if path[0] == "LABEL" else section.keys() & {path[0]}:
            yield from _named(section[name], path[1:], f"{prefix}{name}.")


def _configs(arguments: argparse.Namespace) -> Iterator[Path]:
    """The configs in folders of runs that a command reads: those it is given, or those of the folder it is given."""
    given = getattr(arguments, "config", None) or []
    for path in [given] if isinstance(given, Path) else given:
        places = path.resolve().parents[:2]  # a start's is in starts/
        if any((place / MARKER).exists() for place in places):
            yield path
    if hasattr(arguments, "folder"):
        yield from sorted((arguments.folder / "starts").glob("*.toml"))


def _read(path: Path) -> dict[str, Any]:
    """As the command itself will read it. Empty for one that is not there, or has no TOML: the command says so."""
    try:
        return read_toml(path, "config")
    except (FileNotFoundError, ConfigError):
        return {}
