"""`make bench-learner`: its sides make updates of the recorded pools, and make the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.bench_learner import (
    BARE,
    LEARNER,
    PACKED,
    PACKED_SDPA,
    POOLS,
    head_memory,
    make_equal_pool,
    measure,
    started,
)
from tests.bench.update_case import read_pool

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.parametrize("step", [6, 11])
def test_a_recorded_pool_is_what_a_step_trained_on(step):
    """K trajectories; many of their tokens were sampled twice, and many have no advantage."""
    selected, advantages = read_pool(str(POOLS / f"step{step:02d}.npz"), 96)
    assert len(selected) == len(advantages) == 96
    assert all(t.sampled.sum() == len(t.logprobs) == len(t.versions) for t in selected)
    assert all((t.logprobs <= 0).all() for t in selected)
    assert {t.depth for t in selected} >= {2, 3, 4}
    distinct = {(t.ticket, t.token_ids.tobytes()) for t in selected}
    assert len(distinct) < 96
    assert 0.2 < np.mean(advantages == 0) < 0.8
    assert (POOLS / f"step{step:02d}.npz").stat().st_size < 100_000


def test_trajectories_of_equal_length_are_all_different(tmp_path: Path):
    make_equal_pool(tmp_path / "equal.npz")
    selected, advantages = read_pool(str(tmp_path / "equal.npz"), 96)
    assert {len(t.token_ids) for t in selected} == {300}
    assert len({t.token_ids.tobytes() for t in selected}) == 96
    assert advantages.all()


def test_all_sides_make_updates(tmp_path: Path):
    pool = str(POOLS / "step11.npz")
    case = {"pool": pool, "trajectories": 6, "settings": {"loss.minibatch": 3, "method.budget": 6}}
    sides = {"learner": LEARNER, "packed": PACKED, "packed_sdpa": PACKED_SDPA, "bare": BARE}
    found = measure(case, sides, tmp_path, 2)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_the_memory_of_the_head_is_a_share_of_that_of_all_logits():
    assert 0 < head_memory() < 0.2


def test_a_side_that_cannot_begin_is_quoted(tmp_path: Path):
    case = tmp_path / "case.json"
    case.write_text('{"pool": "/nowhere.npz", "trajectories": 6, "settings": {}}')
    with pytest.raises(RuntimeError, match=r"(?s)learner of .* has ended: .*/nowhere.npz"), started(LEARNER, case):
        pass
