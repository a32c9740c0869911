"""Arguments of several commands: the config, numbers, and whether a config may bring code (`run.trust`)."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cusearch_async.config import CONFIG_HELP
from cusearch_async.errors import ConfigError
from cusearch_async.run.folder import MARKER
from cusearch_async.run.trust import refuse_foreign, settings_in

T = TypeVar("T")


def add_config(parser: argparse.ArgumentParser, without: str = "", default: str = "", looks: bool = True) -> None:
    """The configs of a run. They may be left out where help describes what is done `without`, or there is a `default`.
    `looks`: the command only inspects a run, so it needs --trust for code of others."""
    text = f"{CONFIG_HELP}; without it, {without}" if without else CONFIG_HELP
    count = "*" if without or default else "+"
    parser.add_argument("config", type=Path, nargs=count, default=Path(default) if default else None, help=text)
    if looks:
        add_trust(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """The folder of a run, and one of its steps."""
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    parser.add_argument("--step", type=int, required=True, help="the learner step")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    text = "import the code that a config in a run's folder names, and send secrets to addresses in another user's"
    parser.add_argument("--trust", action="store_true", help=text)


def add_accept_changes(parser: argparse.ArgumentParser) -> None:
    text = "continue with settings that change what the run means"
    parser.add_argument("--accept-changes", action="store_true", help=text)


def refuse_settings_of_nothing(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raises: ConfigError for settings that are given to a command without a config."""
    if overrides and not arguments.config:
        raise ConfigError(f"{overrides[0]} is a setting of a config, and none is named")


def parsed(kind: Callable[[str], T], is_right: Callable[[T], bool], what: str) -> Callable[[str], T]:
    """The type of an argument that is `what`, in words."""

    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            if is_right(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return parse


def at_least(least: int) -> Callable[[str], int]:
    return parsed(int, lambda number: number >= least, f"a whole number of at least {least}")


finite = parsed(float, math.isfinite, "a number")


def refuse_untrusted(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError when a command with `add_trust` would import code that a config in a run's folder names, or
    send a secret to an address that another user's names."""
    if arguments.trust:
        return
    for path in _configs(arguments):
        refuse_foreign(path)


def _configs(arguments: argparse.Namespace) -> Iterator[Path]:
    """The configs in folders of runs that a command reads: those it is given, or those of the folder it is given."""
    given = getattr(arguments, "config", None) or []
    for path in [given] if isinstance(given, Path) else given:
        if path.is_dir():
            yield from settings_in(path)
        places = *path.absolute().parents[:2], *path.resolve().parents  # a start's is in starts/; or a link leads there
        if any((place / MARKER).exists() for place in places):
            yield path
    if isinstance(getattr(arguments, "folder", None), Path):
        yield from settings_in(arguments.folder)
