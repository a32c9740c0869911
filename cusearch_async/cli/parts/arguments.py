"""Arguments of several commands: the config, numbers, and whether a config may bring code.

A config that a user names is the user's, one in the folder of a run may be somebody else's. Commands that only inspect
a run import what such a config names, an environment or a transport, only with `--trust`: modules are searched in the
current folder too."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cusearch_async.config import CONFIG_HELP, VllmConfig, flat, saved_in
from cusearch_async.config.toml import read_toml
from cusearch_async.errors import ConfigError
from cusearch_async.run.folder import MARKER, STARTS

T = TypeVar("T")

CODE = (
    *("method.name", "environment.LABEL.name", "environment.LABEL.reward", "environment.LABEL.agent", "loss.objective"),
    *("retriever.backend", "retriever.bm25.tokenizer", "redis.transport", "weights.transport"),
    "run.trackers",
)
"""Settings that may be package.module:Name."""
PROGRAMS = "environment.LABEL.command"
"""A setting that is a command line."""
ENGINE = "rollout.vllm."
"""The section of vLLM's options: it imports what some of them name."""


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
    text = "import the code that a config in the folder of a run names, if it does"
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
    """Raises: ConfigError when a command with `add_trust` would import code that a config in a run's folder names."""
    if arguments.trust:
        return
    for path in _configs(arguments):
        try:
            settings = read_toml(path, "config")
        except (FileNotFoundError, ConfigError):  # the command itself reports it
            continue
        for key, name in code_in(settings):
            remedy = "add --trust to import it, if you know where the folder comes from"
            raise ConfigError(f"{path} is in the folder of a run and names code, {key} = {name!r}; {remedy}")


def code_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, package.module:Name) of all code that a config names, and (key, command line) of its programs; for vLLM's
    options that are not ours every text may be a name. `settings` as read from TOML."""
    code, programs = ([re.escape(setting).replace("LABEL", ".+") for setting in some] for some in (CODE, [PROGRAMS]))
    for key, value in flat(settings):
        names = value if isinstance(value, list) else [value]
        if any(re.fullmatch(pattern, key, re.DOTALL) for pattern in code):
            yield from ((key, name) for name in names if isinstance(name, str) and ":" in name)
        if value and any(re.fullmatch(pattern, key, re.DOTALL) for pattern in programs):
            yield key, " ".join(map(str, names))
        option = key.removeprefix(ENGINE).partition(".")[0]
        if key.startswith(ENGINE) and option not in VllmConfig.model_fields:
            yield from ((key, name) for name in names if isinstance(name, str))


def _configs(arguments: argparse.Namespace) -> Iterator[Path]:
    """The configs in folders of runs that a command reads: those it is given, or those of the folder it is given."""
    given = getattr(arguments, "config", None) or []
    for path in [given] if isinstance(given, Path) else given:
        if path.is_dir():
            yield from _settings_in(path)
        places = *path.absolute().parents[:2], *path.resolve().parents  # a start's is in starts/; or a link leads there
        if any((place / MARKER).exists() for place in places):
            yield path
    if isinstance(getattr(arguments, "folder", None), Path):
        yield from _settings_in(arguments.folder)


def _settings_in(folder: Path) -> Iterator[Path]:
    """Of a run: of the newest start, of the launch, and of every start."""
    yield from saved_in(folder)
    yield from sorted((folder / STARTS).glob("*.toml"))
