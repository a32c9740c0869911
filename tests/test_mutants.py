"""The planted bugs of mutants.py, which take minutes: here only whether each still fits the code."""

from __future__ import annotations

from tests.mutants import MUTANTS, ROOT, files_of


def test_every_planted_bug_fits_the_code_and_has_tests():
    for name, ((module, tests), right, _) in MUTANTS.items():
        source = (ROOT / "cusearch_async" / module).read_text(encoding="utf-8")
        assert source.count(right) == 1, name
        assert files_of(ROOT, tests), name
