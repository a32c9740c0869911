"""Text of any language: one form for characters that mean the same, and the scripts without spaces between words."""

from __future__ import annotations

import unicodedata

import regex

_SCRIPTS = (
    *("Han", "Hiragana", "Katakana", "Bopomofo", "Yi", "Tangut", "Nushu"),
    *("Thai", "Lao", "Khmer", "Myanmar", "Tibetan"),
    *("Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet", "Balinese", "Javanese"),
)
UNSPACED = (
    "[[[" + "".join(rf"\p{{scx={name}}}" for name in _SCRIPTS) + r"]&&[\p{L}\p{M}\p{Nl}]]"
    r"--[\p{Inherited}\p{Block=Spacing_Modifier_Letters}]]"
)
"""A letter of a script that writes no spaces between words, or a mark that only such scripts have; a class in a V1
pattern of `regex`. Digits are not among them: a number is a word."""
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")


def folded(text: str) -> str:
    """`text` in Unicode's form NFKC, without case, and without characters that are not seen (soft hyphens, zero-width
    spaces, variation selectors).

    "ＬＩＭＡ" -> "lima". Source: the Unicode Standard, 3.13, toNFKC_Casefold."""
    text = _IGNORABLE.sub("", unicodedata.normalize("NFKC", text))
    return unicodedata.normalize("NFKC", text.casefold())
