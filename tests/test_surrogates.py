"""Halves of characters."""

from __future__ import annotations

import pytest

from cusearch_async.surrogates import half_character, without_surrogates


@pytest.mark.parametrize(
    ("text", "half", "whole"),
    [
        ("Łódź 🙂", None, "Łódź 🙂"),
        ("a \ud83d b", "\\ud83d", "a ? b"),
        ("\ude00\ud83d", "\\ude00", "??"),
        ("", None, ""),
    ],
)
def test_the_first_half_is_named_and_all_of_them_are_replaced(text, half, whole):
    assert half_character(text) == half
    assert without_surrogates(text) == whole
