"""Characters that not everything takes: lone surrogates (half characters), which JSON can contain, but UTF-8 and
tokenizers do not accept, and those that a terminal interprets."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the text direction, and lone surrogates."""


def visible(text: str) -> str:
    """`text` with escape sequences for characters that a terminal would interpret or cannot print."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def without_surrogates(text: str) -> str:
    """`text` with a question mark for each lone surrogate."""
    return text.encode("utf-8", "replace").decode()


def half_character(text: str) -> str | None:
    """The first lone surrogate in `text`, as JSON writes it: `\\ud83d`. None when there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
