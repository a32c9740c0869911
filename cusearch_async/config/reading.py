"""Reads a config from TOML files and command-line overrides, and writes it as one file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from cusearch_async.config.keys import is_text
from cusearch_async.config.messages import explain, explain_unknown
from cusearch_async.config.section import nearest
from cusearch_async.config.toml import read_toml
from cusearch_async.config.whole import Config
from cusearch_async.errors import ConfigError
from cusearch_async.files import write_file
from cusearch_async.overrides import settings_in
from cusearch_async.surrogates import half_character

SHIPPED = Path(__file__).parents[1] / "configs"
"""The configs that come with the package; each can be given by its name, like `atlas`."""
_SAVED = ("config.toml", "launch.toml")
"""In the folder of a run: the settings of its newest start; before the first one, of its launch."""
STUDIES = "studies"
"""A folder there, of files for `cusearch study`."""
CONFIG_HELP = (
    "a TOML file, or the name of a config that comes with the package, like atlas; later files override earlier ones"
)


def load_config(files: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Read TOML files, or shipped configs by their names. A later file overrides an earlier one key by key. Then apply
    overrides like `["--learner.lr", "1e-6"]`. A config that a run has saved in its folder means that folder, whatever
    the current one is.

    Raises: ConfigError, one line per mistake."""
    values: dict[str, Any] = {}
    homes = []
    for path in [files] if isinstance(files, Path) else files:
        found = _read(path)
        if home := _home_of(path, found.get("run")):
            found["run"]["folder"] = home
            homes.append((home, found["run"].get("name")))
        _lay_over(values, found)
    _override(values, overrides)
    for home, name in homes:
        if values["run"].get("folder") is home and values["run"].get("name") != name:
            del values["run"]["folder"]  # another run, for which no folder is given
    return _checked(values)


def _home_of(path: Path, run: Any) -> str | None:
    """The folder of `path`, if a run has saved its settings there and from here they would mean another one."""
    if path.name not in _SAVED or not (path.parent / "run.json").is_file() or not isinstance(run, dict):
        return None
    meant = Path(run.get("folder") or Path("runs", run.get("name", "")))
    return None if meant.resolve() == path.parent.resolve() else str(path.parent)


def with_overrides(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The config of `values` as read from TOML, which are changed by the overrides. Raises: ConfigError, one line per
    mistake."""
    _override(values, overrides)
    return _checked(values)


def _override(values: dict[str, Any], overrides: Sequence[str]) -> None:
    for key, value in _pairs(overrides):
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--{key}: {parent} is a value, not a section")
        section[last] = value


def _checked(values: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem) for problem in error.errors())) from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        path = shipped_configs().get(path.as_posix(), path)
    try:
        found = read_toml(path, "config file")
    except FileNotFoundError as error:
        if "=" in path.name:
            raise ConfigError(explain_unknown([str(path)])) from error
        raise ConfigError(f"config file {path} does not exist; {_meant(path)}give {CONFIG_HELP}") from error
    if "study" in found and "run" not in found:
        raise ConfigError(f"{path} is a study, not the config of a run; make its runs with `cusearch study {path}`")
    return found


def saved_in(folder: Path) -> list[Path]:
    """The configs that were saved in the folder of a run, that of its newest start first."""
    return [path for name in _SAVED if (path := folder / name).exists()]


def _meant(path: Path) -> str:
    """ "did you mean …? " for a config that does not exist; empty when no shipped one and no file there is like it."""

    def plain(name: str) -> str:
        return re.sub(r"\.t[a-z]*$", "", name.lower()).replace("-", "_")

    there = [file for file in path.parent.glob("*.toml") if file.exists()]  # no link to nowhere
    known = {plain(str(name)): name for name in (*there, *shipped_configs())}
    near = nearest(plain(str(path)), known, 0.8)
    return f"did you mean {known[near]}? " if near else ""


def _lay_over(values: dict[str, Any], later: dict[str, Any]) -> None:
    """Put the keys of `later` into `values`; sections are merged, everything else is replaced."""
    for key, value in later.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _lay_over(values[key], value)
        else:
            values[key] = value


@cache
def shipped_configs() -> Mapping[str, Path]:
    """Name, like `atlas` or `paper/base` -> file."""
    return {
        path.relative_to(SHIPPED).as_posix().removesuffix(".toml"): path
        for path in sorted(SHIPPED.rglob("*.toml"))
        if STUDIES not in path.relative_to(SHIPPED).parts
    }


def as_toml(config: Config) -> str:
    """The resolved settings, every key that has a value."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def of_toml(text: str) -> Config:
    """What `as_toml` has made."""
    return with_overrides(tomllib.loads(text), ())


def save_config(config: Config, path: Path) -> None:
    """Write the resolved settings as TOML that `load_config` reads back.

    Raises: ConfigError when the run's folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, as_toml(config).encode())
    except OSError as error:
        raise ConfigError(f"run.folder {path.parent} cannot be written: {error.strerror}; choose another") from error


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """("learner.lr", 1e-6) from ["--learner.lr", "1e-6"] or ["--learner.lr=1e-6"]."""
    for name, value in settings_in(overrides):
        if not name.startswith("--") or len(name) < 3:
            raise ConfigError(f"{name!r} is not a setting; write --section.key value")
        if value is None:
            raise ConfigError(f"{name} needs a value: {name} VALUE")
        if half_character(value):
            raise ConfigError(f"{name} {value!r} is not UTF-8")
        key = "run.steps" if name == "--steps" else name[2:]
        yield key, value if is_text(key, value) else _parse(name, value)


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Dotted keys and values as overrides, of which `load_config` reads the same values: a text stays one."""
    return [word for key, value in settings.items() for word in (f"--{key}", _written(key, value))]


def _written(key: str, value: Any) -> str:
    is_quoted = isinstance(value, str) and (value.startswith("--") or not is_text(key, value))  # as TOML has it
    return json.dumps(value, ensure_ascii=False) if is_quoted or isinstance(value, bool | list) else str(value)


def _parse(name: str, text: str) -> Any:
    """The text as a TOML value if it is one, else the text itself. For texts it is not asked: 12e4567 may be a name.

    Raises: ConfigError for half a list, table or quotation."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith(("[", "{", '"', "'")):
            reason = error.args[0].partition(" (at")[0].lower()
            remedy = 'write a list as a,b or as \'["a", "b"]\''
            raise ConfigError(f"{name} {text!r} is no whole value ({reason}); {remedy}") from error
        return text
