"""The run limits are those of the config, each where it belongs."""

from __future__ import annotations

from cusearch_async.config import load_config
from cusearch_async.transport.limits import RunLimits, limits_of


def test_each_limit_is_the_one_of_its_setting(atlas_config):
    given = {
        "pool.questions": 16,
        "pool.rollouts": 5,
        "pool.max_staleness": 3,
        "pool.order": "deferred",
        "pool.defer": 4,
        "pool.hedge_after_s": 11,
        "pool.max_attempts": 6,
        "run.steps": 90,
        "episode.s_max": 7,
        "redis.lease_s": 9,
        "redis.max_trajectories": 5000,
        "redis.max_mib": 13,
        "method.budget": 20,
        "loss.minibatch": 20,
    }
    config = load_config(atlas_config, [word for key, value in given.items() for word in (f"--{key}", str(value))])
    assert limits_of(config, 384) == RunLimits(
        questions=16,
        rollouts=5,
        max_staleness=3,
        steps=90,
        order="deferred",
        defer=4,
        hedge_s=11,
        s_max=7,
        lease_s=9,
        max_attempts=6,
        limit=5000,
        limit_bytes=13 * 2**20,
        max_tokens=config.episode.max_tokens,
        vocab_size=384,
    )
