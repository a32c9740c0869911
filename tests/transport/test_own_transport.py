"""A custom transport in place of Redis, the one of docs/examples: processes and commands use only the
interface."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest

from cusearch_async.cli import buckets, buffer, launch
from cusearch_async.cli.parts.opening import open_run, read_ledger
from cusearch_async.cli.reset import count_keys, forget_keys
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerStatus, WorkerStatus
from docs.examples.one_process import RUNS
from tests.strategies import make_trajectory

OURS = Identity({"run.seed": "0"})


@pytest.fixture
def config(atlas_config):
    RUNS.clear()
    yield load_config(atlas_config, ["--redis.transport", "docs.examples.one_process:open_buffer"])
    RUNS.clear()


async def test_a_run_on_a_custom_transport_is_worked_on_and_looked_into(config, capsys):
    async with open_buffer(config, identity=OURS) as learner, open_buffer(config, identity=OURS) as worker:
        await learner.recover(0)
        await learner.announce(0, "v000000-e1")
        slot, *_ = await worker.admit("w", 0, 3)
        assert await worker.put(make_trajectory(slot.ticket, slot.rollout)) == "stored"
        await worker.heartbeat("w", [slot.ticket], WorkerStatus(episodes=1))
    counts, audit = await read_ledger(config)
    assert (counts.finished, counts.buffered, audit.closes) == (1, 1, True)
    await buckets.show_workers(config, with_contract=False)
    await buckets.show_workers(config, with_contract=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["w"] in [line[:1] for line in lines]
    assert ["run.seed", "0"] in lines


async def test_commands_that_change_a_run_need_no_redis(config):
    async with open_buffer(config, identity=OURS) as learner:
        await learner.recover(0)
        await buffer.change(config, Namespace(action="pause"))
        assert (await learner.state()).paused
    assert await count_keys(config) == 1
    assert await forget_keys(config) == 1
    with pytest.raises(ConfigError, match="has no run 'atlas'; it has none"):
        async with open_run(config):
            pass


async def test_a_transport_that_there_is_not_is_refused_by_name(atlas_config):
    config = load_config(atlas_config, ["--redis.transport", "nats"])
    with pytest.raises(ConfigError, match=r"redis\.transport 'nats' is unknown; use one of redis, or your own as"):
        async with open_buffer(config):
            pass


async def hold(config) -> None:
    async with open_buffer(config, identity=Identity({}).in_folder(config.folder)) as buffer:
        await buffer.recover(0)
        await buffer.learner_heartbeat(LearnerStatus(epoch=1, host="h", pid=7, step=0))


@pytest.mark.usefixtures("config")
def test_a_run_that_is_alive_in_a_buffer_of_ones_own_is_not_launched_again(atlas_config, tmp_path):
    """launch looked for a listener at redis.url instead, which is of no form here, and has none."""
    overrides = ["--run.folder", str(tmp_path), "--redis.transport", "docs.examples.one_process:open_buffer"]
    overrides += ["--redis.url", "sqlite:///buffer.db"]
    asyncio.run(hold(load_config(atlas_config, overrides)))
    arguments = Namespace(config=[atlas_config], accept_changes=False, take_over=False)
    with pytest.raises(RunInUse, match=r"run 'atlas' is alive: the learner \(process 7 on h\); stop it first"):
        launch.run(arguments, overrides)
