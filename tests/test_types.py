"""A trajectory's rows: together they are all of its tokens, each once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from cusearch_async.errors import InvalidTrajectory
from tests.strategies import make_trajectory, trajectories


@given(trajectories())
def test_rows_are_the_trajectory_divided(trajectory):
    rows = trajectory.rows
    for name in ("token_ids", "sampled", "logprobs", "versions"):
        together = np.concatenate([getattr(row, name) for row in rows])
        np.testing.assert_array_equal(together, getattr(trajectory, name))
    for start, row in zip(trajectory.starts, rows, strict=True):
        assert row.token_ids[0] == trajectory.token_ids[start]
        assert row.sampled.sum() == row.sampled_tokens == len(row.versions)


def test_a_row_has_a_prompt_and_then_turns_and_observations():
    (row,) = make_trajectory().rows
    assert [part.tolist() for part in row.parts] == [[5, 6, 7], [8, 9], [10, 11], [12, 13]]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 9), (0, -3), (5, 0), (0, 3), (0, 5, 6), (0, 2)])
def test_every_row_needs_a_prompt_and_a_turn(starts):
    """Prompt 0 to 2, turn 3 and 4, observation 5 and 6, turn 7 and 8."""
    with pytest.raises(InvalidTrajectory, match="needs a prompt and at least one sampled token in each row"):
        make_trajectory(starts=starts)


def test_a_row_may_begin_with_an_observation():
    assert [len(row.token_ids) for row in make_trajectory(starts=(0, 5)).rows] == [5, 4]
