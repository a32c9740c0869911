"""The tree of errors, and what is said of an error."""

from __future__ import annotations

import re

import pytest

from cusearch_async import errors
from cusearch_async.errors import CusearchError, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one \ntwo"), "one "),
        (ValueError(), "ValueError"),
        (TimeoutError(" \n"), "TimeoutError"),
    ],
)
def test_an_error_is_told_in_its_first_line_or_by_its_type(error, line):
    assert first_line(error) == line


def test_the_tree_names_every_error_and_all_are_in_it():
    named = set(re.findall(r"[├└]── (\w+)", errors.__doc__))
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"CusearchError"}
    assert named == defined
    assert all(issubclass(getattr(errors, name), CusearchError) for name in named)
