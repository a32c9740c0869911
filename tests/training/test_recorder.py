"""Records of steps: written beside the loop, bounded, and replayed with the same outcome."""

from __future__ import annotations

import errno
import logging
import threading
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.replay.selection import RecordedStep, checkpoint_before
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.training import recorder
from cusearch_async.training.recorder import MIB, Recorder, read_record, recorded
from cusearch_async.training.selector import Selector, initial_method_state
from cusearch_async.transport import codec
from cusearch_async.types import Pool
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS
from tests.transport.test_codec import assert_same

SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")
DEPTHS = [[1, 3, 2, 1, 1, 5, 0, 1], [4, 4, 5, 3, 2, 5, 1, 1], [2, 2, 4, 4, 5, 5, 3, 5]]
REWARDS = [0.2, 1.0, 0.7, 0.7, 0.2, 0.55, 1.0, 0.0]


@pytest.fixture
def config_of(atlas_config, tmp_path):
    def make(*overrides):
        config = load_config(atlas_config, [*SMALL, "--run.folder", str(tmp_path / "run"), *overrides])
        run_folder.mark(config.folder, config.run.name)
        record_start(config, 3, 0)
        return config

    return make


def pool_of(step):
    return Pool(
        step,
        tuple(
            make_trajectory(step * 4 + i // 2, i % 2, depth=DEPTHS[step][i], reward=reward)
            for i, reward in enumerate(REWARDS)
        ),
    )


async def record_all(config, epoch=3, steps=3):
    """What a learner chose of the pools, as it was recorded."""
    selector = Selector(config, QUESTIONS, initial_method_state(config.method, config.episode.s_max))
    chosen = [selector.choose(pool_of(step)) for step in range(steps)]
    async with Recorder(config.folder, config.run.records_mib, epoch) as own:
        for choice in chosen:
            own.write(choice)
            await own.finish()
    return chosen


@pytest.mark.parametrize("method", ["sdga_phase", "random", "ar3po", "stratified_grpo", "random_siblings"])
async def test_every_step_is_chosen_again_as_it_was(config_of, method):
    config = config_of("--method.name", method)
    for chosen in await record_all(config):
        step = RecordedStep.read(config.folder, chosen.pool.step)
        for read, written in zip(step.pool, chosen.pool, strict=True):
            assert_same(read, written)
        assert step.recorded.indices.tolist() == chosen.indices.tolist()
        assert step.recorded.advantages.tolist() == chosen.advantages.values.tolist()
        assert step.choose(step.config).is_same(step.recorded)


async def test_a_method_goes_on_from_what_it_remembered_at_that_step(config_of):
    """The phase is 2 at step 2; from phase 0 the same pool would be chosen from otherwise."""
    config = config_of("--method.phase_reserve", "0")
    *_, last = await record_all(config)
    assert [read_record(config.folder, step).metrics["phase"] for step in range(3)] == [0, 1, 2]
    step = RecordedStep.read(config.folder, 2)
    assert step.choose(config).is_same(step.recorded)
    assert step.record.memory == '{"phase":1}'
    assert last.remembered.memory == '{"phase":2}'


async def test_another_method_chooses_from_the_same_pool(config_of):
    config = config_of()
    await record_all(config)
    step = RecordedStep.read(config.folder, 1)
    depths = np.array(DEPTHS[1])
    deepest, shallowest = (step.choose(config_of("--method.name", name)).indices for name in ("sdga_auto", "sdga_anti"))
    assert sorted(depths[deepest]) == [4, 4, 5, 5]
    assert sorted(depths[shallowest]) == [1, 1, 2, 3]


async def test_a_changed_selection_is_noticed(config_of):
    config = config_of("--method.name", "random")
    await record_all(config)
    step = RecordedStep.read(config.folder, 0)
    assert not step.choose(config_of("--method.name", "random", "--run.seed", "1")).is_same(step.recorded)
    assert not step.choose(config_of("--method.name", "random", "--method.singleton", "zero")).is_same(step.recorded)


async def test_records_take_no_more_than_is_allowed_and_the_oldest_go(config_of, monkeypatch):
    config = config_of()
    await record_all(config)
    size = max(path.stat().st_size for path in recorded(config.folder).values())
    monkeypatch.setattr(recorder, "MIB", size + 16)  # room for two
    await record_all(config_of("--run.records_mib", "2"), epoch=4)
    assert {path.name for path in (config.folder / "records").iterdir()} == {"000001-e4.zz", "000002-e4.zz"}


async def test_a_record_that_another_learner_has_deleted_meanwhile_is_no_error(config_of, monkeypatch, caplog):
    config = config_of()
    await record_all(config)
    there = recorder.entries

    def then_gone(*arguments):
        found = there(*arguments)
        for path in config.folder.glob("records/*-e3.zz"):
            path.unlink()
        return found

    monkeypatch.setattr(recorder, "entries", then_gone)
    monkeypatch.setattr(recorder, "MIB", 1)
    await record_all(config, epoch=4)
    assert not caplog.records
    assert (config.folder / "records" / "000002-e4.zz").exists()


async def test_nothing_is_recorded_where_there_is_no_room_for_records(config_of):
    config = config_of("--run.records_mib", "0")
    await record_all(config)
    assert recorded(config.folder) == {}


async def test_steps_that_a_later_learner_has_gone_back_behind_do_not_count(config_of):
    """As their metrics, scores and checkpoints do not: they are of another course of the run."""
    config = config_of()
    await record_all(config, epoch=3)
    record_start(config, 12, 1)
    await record_all(config, epoch=12, steps=2)  # of which it has made step 1 only
    (config.folder / "records" / "000000-e12.zz").unlink()
    assert {step: path.name for step, path in recorded(config.folder).items()} == {
        0: "000000-e3.zz",
        1: "000001-e12.zz",
    }
    with pytest.raises(ConfigError, match="has no record of step 2; it has steps 0 to 1"):
        read_record(config.folder, 2)


async def test_a_slow_disk_costs_a_record_and_not_the_loop(config_of, caplog, monkeypatch):
    config = config_of()
    chosen = await record_all(config)
    record_start(config, 5, 0)
    is_full = threading.Event()
    write = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda self, of: (is_full.wait(30), write(self, of)))
    async with Recorder(config.folder, config.run.records_mib, 5) as own:
        with caplog.at_level(logging.WARNING):
            own.write(chosen[0])
            own.write(chosen[1])
        is_full.set()
        await own.finish()
    assert "step 1 is not recorded: the previous record is still being written" in caplog.text
    assert {step: path.name for step, path in recorded(config.folder).items()} == {0: "000000-e5.zz"}


async def test_a_full_disk_costs_records_and_not_the_run(config_of, caplog, monkeypatch):
    """Neither the next step nor the end of the loop raises; the next record is written as soon as there is room."""
    config = config_of()
    chosen = await record_all(config)
    record_start(config, 5, 0)
    write = Path.write_bytes

    def refuse(path, content):
        if path.name.endswith("000000-e5.zz"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    async with Recorder(config.folder, config.run.records_mib, 5) as own:
        for choice in chosen[:2]:
            own.write(choice)
            await own.finish()
    [warning] = caplog.messages
    assert warning.startswith("step 0 is not recorded: WriteFailed: cannot write ")
    assert warning.endswith("000000-e5.zz: No space left on device")
    assert [path.name for path in recorded(config.folder).values()] == ["000001-e5.zz"]


async def test_a_folder_that_takes_no_record_is_named(config_of, caplog):
    config = config_of()
    [chosen] = await record_all(config_of("--run.records_mib", "0"), steps=1)
    (config.folder / "records").write_text("in the way")
    async with Recorder(config.folder, config.run.records_mib, 5) as own:
        own.write(chosen)
        await own.finish()
    assert "step 0 is not recorded: WriteFailed: cannot write" in caplog.text


async def test_a_step_without_a_record_is_told_with_those_that_have_one(config_of):
    config = config_of()
    with pytest.raises(ConfigError, match="has no record of step 0; it has none"):
        read_record(config.folder, 0)
    await record_all(config)
    with pytest.raises(ConfigError, match="has no record of step 7; it has steps 0 to 2"):
        read_record(config.folder, 7)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"\0" + b[1:], lambda b: b""])
async def test_a_damaged_record_is_refused_by_name(config_of, damage):
    config = config_of()
    await record_all(config)
    path = recorded(config.folder)[1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"000001-e3\.zz cannot be read"):
        read_record(config.folder, 1)


def change(config, at, **fields):
    """Give the record of a step other fields, as somebody else may have done."""
    path = recorded(config.folder)[at]
    content = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()))
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(content | fields)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"selected": [0, 1, 2, 8]}, "selected holds 8, and the pool has 8 trajectories"),
        ({"selected": [0, 1, 2, -1]}, "selected holds -1"),
        ({"selected": [0, 1, 2, 2**63]}, "selected holds 9223372036854775808"),
        ({"selected": [0]}, "1 are selected, with 4 advantages"),
        ({"step": 7}, "it is of step 7"),
        ({"pool": []}, "the pool has 0 trajectories"),
    ],
)
async def test_a_record_that_no_learner_writes_is_refused_and_named(config_of, fields, said):
    config = config_of()
    await record_all(config)
    change(config, 1, **fields)
    with pytest.raises(ConfigError, match=rf"000001-e3\.zz is damaged, or of another run: .*{said}"):
        RecordedStep.read(config.folder, 1)


@pytest.mark.parametrize("memory", ['{"phase":"x"}', '{"phase":99}', '{"phase":-3}', "[1]", "{", "[" * 100_000])
async def test_a_memory_that_is_not_the_methods_is_refused(config_of, memory):
    config = config_of()
    await record_all(config)
    change(config, 1, memory=memory)
    step = RecordedStep.read(config.folder, 1)
    with pytest.raises(ConfigError, match="step 1"):
        step.choose(config)


async def test_a_trajectory_beyond_the_runs_limits_is_refused_and_named(config_of):
    config = config_of()
    await record_all(config)
    change(config, 1, pool=[codec.encode(make_trajectory(4 + i, 0, depth=99)) for i in range(8)])
    with pytest.raises(ConfigError, match=r"the record of step 1 .* is damaged: .*depth must be at most 5, got 99"):
        RecordedStep.read(config.folder, 1)


async def test_a_record_is_unpacked_up_to_a_limit_and_none_beyond_it_is_written(config_of, monkeypatch, caplog):
    config = config_of()
    [chosen] = await record_all(config, steps=1)
    path = recorded(config.folder)[0]
    size = len(zlib.decompress(path.read_bytes()))
    monkeypatch.setattr(recorder, "MOST_BYTES", size)
    assert read_record(config.folder, 0).step == 0
    monkeypatch.setattr(recorder, "MOST_BYTES", size - 1)
    with pytest.raises(ConfigError, match=r"000000-e3\.zz cannot be read: it holds more than"):
        read_record(config.folder, 0)
    record_start(config, 4, 0)
    async with Recorder(config.folder, config.run.records_mib, 4) as own:
        own.write(chosen)
        await own.finish()
    assert "step 0 is not recorded: its pool takes" in caplog.text
    assert not list(config.folder.glob("records/*-e4.zz"))


async def test_a_pool_that_is_too_large_is_not_encoded_first(config_of, monkeypatch, caplog):
    config = config_of()
    [chosen] = await record_all(config, steps=1)
    monkeypatch.setattr(recorder, "MOST_BYTES", sum(one.token_ids.nbytes for one in chosen.pool))
    monkeypatch.setattr(recorder.codec, "encode", lambda _: pytest.fail("it is encoded"))
    async with Recorder(config.folder, config.run.records_mib, 4) as own:
        own.write(chosen)
        await own.finish()
    assert "step 0 is not recorded: its pool takes" in caplog.text


async def test_a_small_file_does_not_fill_the_memory(config_of, monkeypatch):
    config = config_of()
    await record_all(config)
    recorded(config.folder)[1].write_bytes(zlib.compress(bytes(64 * MIB)))
    monkeypatch.setattr(recorder, "MOST_BYTES", 4 * MIB)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="it holds more than 4 MiB"):
        read_record(config.folder, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB


def test_a_folder_that_is_no_runs_is_said_to_be_none(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run; give one like runs/demo"):
        RecordedStep.read(tmp_path, 5)


@pytest.mark.parametrize(
    ("name", "generates"), [("grpo_half", "2 groups of up to 2"), ("ar3po", "4 groups of up to 4")]
)
async def test_a_method_that_generates_other_groups_is_not_given_the_recorded_ones(config_of, name, generates):
    """grpo_half would have generated half of them, and ar3po groups of several sizes: both were GRPO-Full."""
    config = config_of()
    await record_all(config)
    step = RecordedStep.read(config.folder, 0)
    told = (
        rf"{name} cannot be replayed: it generates {generates} rollouts .* of step 0 has 4 groups of up to 2, of sdga"
    )
    with pytest.raises(ConfigError, match=told):
        step.choose(config_of("--method.name", name))
    assert len(step.choose(config_of("--method.name", "grpo_full")).indices) == 8


async def test_an_update_of_several_ranks_is_not_made_again_by_one(config_of):
    config = config_of("--learner.ranks", "2")
    with pytest.raises(ConfigError, match=r"was made by learner.ranks = 2, which add up in another order than one"):
        checkpoint_before(config.folder, 0, config.learner)


async def test_an_update_without_its_checkpoint_says_which_are_kept(config_of):
    config = config_of()
    await record_all(config)
    assert checkpoint_before(config.folder, 0, config.learner) is None
    with pytest.raises(ConfigError, match=r"the update of step 2 needs the checkpoint .* keeps none"):
        checkpoint_before(config.folder, 2, config.learner)
