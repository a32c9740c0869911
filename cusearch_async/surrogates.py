"""Lone surrogates (half characters): JSON can contain them, but UTF-8 and tokenizers do not accept them."""

from __future__ import annotations


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
