"""The log of a process that `launch` has started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cusearch_async.cli.parts.fleet import Child


@pytest.fixture
def child(tmp_path):
    """The learner of a second launch, whose log has been read to its end."""
    log = tmp_path / "learner.log"
    log.write_text("10:00:00 learner: of the launch before\n" * 100)
    process: Any = SimpleNamespace(returncode=1)
    return Child("learner", process, log, log.stat().st_size, log.stat().st_size)


def test_a_log_that_was_taken_away_ends_nothing(child):
    """As logrotate does by default: it ended the whole run."""
    child.log.rename(child.log.with_suffix(".1"))
    assert child.new_lines() == []
    child.log.unlink()
    assert child.describe_end() == f"learner ended with status 1 (log: {child.log})"


def test_a_log_that_was_emptied_is_read_from_its_beginning(child):
    """As logrotate does, or a user on a full disk: nothing was shown until the log was as long as before."""
    with child.log.open("a") as log:
        log.write("10:00:01 learner: step 0\n")
    assert child.new_lines() == ["step 0"]
    child.log.write_text("10:00:02 learner: step 1\nlearner: the disk is full\n")
    assert child.new_lines() == ["step 1"]
    assert child.describe_end() == f"learner ended with status 1: learner: the disk is full (log: {child.log})"
