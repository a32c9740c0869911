"""The planted bugs of `mutants.py` fit the code, so that `make mutants` still plants them."""

from __future__ import annotations

from tests.mutants import MUTANTS, ROOT, files_of


def test_each_planted_bug_changes_one_place_and_has_tests_that_should_find_it():
    is_tested = {tests: bool(files_of(ROOT, tests)) for tests in {tests for (_, tests), _, _ in MUTANTS.values()}}
    misfits = [
        name
        for name, ((module, tests), right, wrong) in MUTANTS.items()
        if (ROOT / "cusearch_async" / module).read_text(encoding="utf-8").count(right) != 1
        or right == wrong
        or not is_tested[tests]
    ]
    assert misfits == []
