"""What is printed of a text that others wrote: questions, answers, passages, names in Redis."""

from __future__ import annotations

import re

from rich.text import Text

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of writing, and halves of characters."""


def visible(text: str) -> str:
    """With what a terminal would obey, or could not print, as its escape sequence."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain(text: str, style: str = "") -> Text:
    """For rich, which takes no markup in it."""
    return Text(visible(text), style=style)
