"""The words of a text, as BM25 counts them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import regex
import xxhash

from cusearch_async.errors import ConfigError
from cusearch_async.extensions import load_function
from cusearch_async.folding import UNSPACED, folded

Tokenizer = Callable[[str], Iterable[str]]
"""The words of a folded text (see `folding`)."""
UNICODE = "unicode"

_RUN = regex.compile(r"[\w\p{M}\p{N}]+")
_CHARACTER = rf"[{UNSPACED}\p{{Hangul}}]\p{{M}}*"
_PIECE = regex.compile(rf"(?:{_CHARACTER})+|[^{UNSPACED}\p{{Hangul}}]{{2,}}", regex.V1)
_CHARACTERS = regex.compile(_CHARACTER, regex.V1)
_SAMPLE = (
    "The capital of Peru is Lima, 9.7 million. 秘鲁的首都是利马。ペルーの首都はリマです。페루의 수도는 리마이다. "
    "เมืองหลวงของเปรูคือลิมา पेरू की राजधानी लीमा है। عاصمة بيرو هي ليما"
)


def unicode_words(text: str) -> list[str]:
    """Words of two letters or digits and more, as bm25s finds them in English. Where a script writes no spaces, and in
    Hangul, where endings are written on words: each character, and each two neighbours (as Lucene's CJKAnalyzer, with
    its single characters).

    "peru 秘鲁首都" -> ["peru", "秘", "鲁", "首", "都", "秘鲁", "鲁首", "首都"]."""
    words = []
    for run in _RUN.findall(text):
        if run.isascii():
            words += [run] if len(run) > 1 else []
            continue
        for piece in _PIECE.findall(run):
            characters = _CHARACTERS.findall(piece)
            words += [*characters, *map("".join, itertools.pairwise(characters))] if characters else [piece]
    return words


def words_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """The words of any text: of a passage and of a query alike."""
    return [word for word in tokenizer(folded(text)) if word.strip()]


def tokenizer_named(name: str) -> Tokenizer:
    """`unicode`, or a user's own as package.module:function. Raises: ConfigError when it gives no words."""
    if name == UNICODE:
        return unicode_words
    key = "retriever.bm25.tokenizer"
    own: Tokenizer = load_function(key, name, (UNICODE,))
    try:
        words_of(_SAMPLE, own)
    except Exception as error:  # whatever a user's function does
        raise ConfigError(
            f"{key}: {name} must give the words of a text as a list of texts ({type(error).__name__}: {error})"
        ) from error
    return own


def identity(tokenizer: Tokenizer) -> str:
    """Its name, and a checksum of what it makes of a sample, so that an index by another version of it is known."""
    words = "\n".join(words_of(_SAMPLE, tokenizer))
    named = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{named.__module__}:{named.__qualname__} ({xxhash.xxh3_64_hexdigest(words.encode())[:8]})"
