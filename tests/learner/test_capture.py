"""What all ranks write of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cusearch_async.errors import WriteFailed

pytestmark = pytest.mark.system  # imports DeepSpeed


def captured(own_error: Exception | None, others: list[str]):
    """The function that writes, and what it waited for."""
    from cusearch_async.learner.learner import DeepSpeedLearner

    waited = []

    def write():
        if own_error:
            raise own_error

    ranks = SimpleNamespace(wait_for_answers=lambda name: waited.append(name) or others)
    parts = {"_tell": lambda command: None, "_capture": lambda folder: write, "_captures": 0, "_ranks": ranks}
    return DeepSpeedLearner.capture(SimpleNamespace(**parts), "folder"), waited


def test_another_ranks_failure_is_named():
    write, _ = captured(None, ["", "rank 1 cannot write its part: No space left on device"])
    with pytest.raises(WriteFailed, match=r"^rank 1 cannot write its part: No space"):
        write()


def test_a_rank_that_cannot_write_waits_for_the_others():
    """They write into the folder that is deleted then: before, one could make it again."""
    write, waited = captured(OSError("No space left on device"), ["rank 1 cannot write its part"])
    with pytest.raises(OSError, match=r"^No space"):
        write()
    assert waited == ["written/1"]
