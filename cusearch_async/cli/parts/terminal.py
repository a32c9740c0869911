"""Text on a terminal: foreign text (questions, answers, passages, names in Redis), safely, and durations."""

from __future__ import annotations

import re

from rich.text import Text

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the text direction, and lone surrogates."""


def visible(text: str) -> str:
    """`text` with escape sequences for characters that a terminal would interpret or cannot print."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def cut(text: str) -> Text:
    """`text` in one line, for a column that is narrowed where the terminal is: the end is then cut off with "…"."""
    return Text(visible(" ".join(text.split())), no_wrap=True, overflow="ellipsis")


def plain(text: str, style: str = "") -> Text:
    """`text` for rich, without markup."""
    return Text(visible(text), style=style)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
