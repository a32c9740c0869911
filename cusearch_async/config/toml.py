"""Reads TOML as people write it: the error names the mistake in the line, where that can be seen."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from cusearch_async.errors import ConfigError

_VALUE = r"^\s*[\w.\"'-]+\s*=\s*"
_CAUSES = {
    "([“”„‟‘’‚«»″])": '{} is a typographic quote; write "',
    "([\u00a0\u200b\ufeff])": "the line contains {!a}, an invisible character; remove it",
    _VALUE + r"(True|yes)\s*(?:#.*)?$": "for {} write true",
    _VALUE + r"(False|no)\s*(?:#.*)?$": "for {} write false",
    _VALUE + r"(None|null|nil)\s*(?:#.*)?$": "for {} leave the key out",
    _VALUE + r"([A-Za-z_./~$\\].*?)\s*(?:#.*)?$": 'text needs quotes: "{}"',
    r"^\s*(\{)": 'it looks like JSON; in TOML it is [run], and below it name = "mine"',
    r"^\s*([\w.-]+)\s*:": "it looks like YAML; in TOML it is key = value",
}
"""What is wrong with a line -> how to write it, with the first group of the match."""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file, also of one with a byte order mark or Windows line ends.

    Raises: FileNotFoundError; ConfigError, one line that begins with `what` and the path."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise ConfigError(f"{what} {path} is a folder; give a .toml file in it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        lines = text.splitlines() or [""]
        line = lines[min(int(place[1]), len(lines)) - 1 if place else -1]
        found = ((re.search(form, line), cause) for form, cause in _CAUSES.items())
        cause = next((f"; {cause.format(match[1])}" for match, cause in found if match), "")
        raise ConfigError(f"{what} {path} is not valid TOML: {error}{cause}") from error
