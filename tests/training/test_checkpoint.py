"""Checkpoints: complete or absent."""

from __future__ import annotations

import pytest

from cusearch_async.algorithm.methods import State
from cusearch_async.errors import ConfigError
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState


def state_at(step: int) -> CheckpointState:
    method = State(phase=step // 2, visits={"atlas/2/Pinsk": ((1, 3), (step, 6))})
    sizes = {step * 4: 6, step * 4 + 1: 1}
    return CheckpointState(step=step, method=method, sizes=sizes, ranks=1, zero_stage=1, questions=64, rollouts=3)


def save(checkpoints: Checkpoints, step: int) -> int:
    folder = checkpoints.unfinished(step)
    folder.mkdir()
    (folder / "weights").write_text(str(step))
    return checkpoints.finish(state_at(step))


def test_the_newest_complete_checkpoint_is_found_with_its_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert checkpoints.newest() is None
    save(checkpoints, 2)
    save(checkpoints, 10)
    folder, state = checkpoints.newest()
    assert state == state_at(10)
    assert (folder / "weights").read_text() == "10"


def test_an_unfinished_checkpoint_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 2)
    checkpoints.unfinished(4).mkdir()
    assert checkpoints.newest()[1].step == 2


def test_a_checkpoint_with_a_torn_state_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 2)
    save(checkpoints, 4)
    (tmp_path / "checkpoints" / "step000004" / "state.json").write_text('{"step": 4')
    assert checkpoints.newest()[1].step == 2


def test_old_checkpoints_go_and_the_oldest_kept_step_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert [save(checkpoints, step) for step in (2, 4, 6, 8)] == [2, 2, 4, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step000006", "step000008"]


def test_a_checkpoint_saved_again_replaces_the_old_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    save(checkpoints, 2)
    assert checkpoints.newest()[1].step == 2


@pytest.mark.parametrize("content", ["{}", '{"step": 10, "phase": 2, "ranks": 1, "zero_stage": 1}'])
def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(tmp_path, content):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    (tmp_path / "checkpoints" / "step000002" / "state.json").write_text(content)
    with pytest.raises(ConfigError, match="readable by this version"):
        checkpoints.newest()
