"""Half characters (lone surrogates): JSON can spell one, but neither UTF-8 nor a tokenizer takes it."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    """`text` with a question mark for each half of a character."""
    return text.encode("utf-8", "replace").decode()


def half_character(text: str) -> str | None:
    """The first half of a character in `text`, as JSON spells it: `\\ud83d`. None when there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
