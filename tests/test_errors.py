"""The errors, and the line that is printed of one."""

from __future__ import annotations

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


def test_every_error_is_ours_and_has_a_description():
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(kinds) > 20
    assert all(issubclass(kind, CusearchError) and "__doc__" in vars(kind) for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)
