"""Reads TOML as people write it: the error says what is wrong in the line, where that can be seen."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from cusearch_async.errors import ConfigError

_QUOTES = "“”„‟‘’‚«»″"
_BLANKS = {"\u00a0": "a no-break space", "\u200b": "a zero-width space", "\ufeff": "a byte order mark"}
_WORDS = {"True": "write true", "False": "write false", "yes": "write true", "no": "write false"} | dict.fromkeys(
    ("None", "null", "nil"), "leave the key out"
)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file, also of one with a byte order mark or Windows line ends.

    Raises: FileNotFoundError; ConfigError, one line that begins with `what` and the path."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        cause = cause_in(text, str(error))
        raise ConfigError(f"{what} {path} is not valid TOML: {error}{'; ' if cause else ''}{cause}") from error


def cause_in(text: str, message: str) -> str:
    """What is probably wrong where tomllib's `message` points; empty if that cannot be seen."""
    if text.lstrip().startswith("{"):
        return 'it looks like JSON; in TOML it is [run], and below it name = "mine"'
    place = re.search(r"line (\d+)", message)
    lines = text.splitlines()
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else (lines or [""])[-1]
    strange = re.search(f"[{_QUOTES}{''.join(_BLANKS)}]", line)
    if strange and strange[0] in _QUOTES:
        return f'{strange[0]} is a typographic quote; write "'
    if strange:
        return f"the line holds {_BLANKS[strange[0]]}; remove it"
    return _about_value(line)


def _about_value(line: str) -> str:
    value = re.match(r"\s*[\w.\"'-]+\s*=\s*(.*?)\s*(#.*)?$", line)
    if value and value[1] in _WORDS:
        return f"for {value[1]} {_WORDS[value[1]]}"
    if value and re.fullmatch(r"[A-Za-z_./~$\\].*", value[1]):
        return f'text needs quotes: "{value[1]}"'
    if not value and re.match(r"\s*[\w.-]+\s*:", line):
        return "it looks like YAML; in TOML it is key = value"
    return ""
