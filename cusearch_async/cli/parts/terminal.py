"""Text on a terminal: foreign text (questions, answers, passages, names in Redis), safely, and durations."""

from __future__ import annotations

from rich.text import Text

from cusearch_async.surrogates import visible


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
