"""The methods of docs/examples, as a run uses them."""

from __future__ import annotations

import numpy as np
import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from docs.examples.methods import Frontier
from tests.strategies import make_pool


def pool_of(depths, passed):
    return make_pool(depths, rollouts=1, passed=passed)


@pytest.fixture
def method_of(atlas_config):
    def make(name, *overrides):
        changes = ["--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4"]
        return load_config(
            atlas_config, [*changes, "--method.name", f"docs.examples.methods:{name}", *overrides]
        ).method.make()

    return make


def test_a_method_without_memory_selects_its_budget(method_of):
    method = method_of("ShortestFirst")
    pool = pool_of([3, 0, 1, 5, 0, 1, 4, 2], [True] * 8)
    selection = method.select(pool, method.decode("", 5), np.random.default_rng(0))
    assert sorted(pool.depths[selection.indices]) == [0, 0, 1, 1]


def test_a_method_with_memory_remembers_in_a_text_and_shows_what_it_wants(method_of):
    method = method_of("FrontierDepth", "--method.step_size", "0.5")
    memory = method.decode("", 5)
    for _ in range(2):
        memory = method.select(pool_of([1, 1, 2, 2, 3, 3], [True] * 6), memory, np.random.default_rng(0)).memory
    assert memory == Frontier(2.0)
    assert method.decode(method.encode(memory), 5) == memory
    assert method.fields(memory) == {"frontier": 2.0}
    stays = method.select(pool_of([1, 1, 2, 2], [False] * 4), memory, np.random.default_rng(0)).memory
    assert stays == memory


def test_a_setting_of_ones_own_method_is_checked(method_of):
    with pytest.raises(ConfigError, match=r"method\.step_size: .*number.*got 'fast'"):
        method_of("FrontierDepth", "--method.step_size", "fast")
