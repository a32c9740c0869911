"""Rank 0 takes a run over, goes on from its checkpoint and ends, on the buffer in memory with a learner that writes
down what it is told."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cusearch_async.config import load_config, of_toml
from cusearch_async.errors import ConfigError, ContractMismatch, Fenced, NonFiniteUpdate, RunInUse, WriteFailed
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import read_starts, record_start
from cusearch_async.run.identity import DATA, NOBODY, Identity
from cusearch_async.training import takeover
from cusearch_async.training.checkpoint import checkpoints_of, state_at
from cusearch_async.training.selector import initial_method_state
from cusearch_async.training.takeover import Leader, explain
from cusearch_async.transport.interface import LearnerStatus
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.weights.folder import WeightStore
from tests.conftest import free_port
from tests.training.learners import QUESTIONS, Learner, Recorded, at_once

CONTRACT = Identity({DATA: "5 (abc)", "run.seed": "0"})
ELSEWHERE = LearnerStatus(epoch=2, host="elsewhere", pid=7, step=1)


class Buffer(Recorded):
    """Also writes down what is on disk when the run is taken over."""

    def __init__(self, run, config, events, identity=CONTRACT):
        super().__init__(run, config, events, lambda ticket, rollout: 1, identity)
        self.folder = config.folder

    async def recover(self, step, *arguments):
        await super().recover(step, *arguments)
        self.events.append(f"recover {step}")
        self.on_disk = files_in(self.folder)


class Rank0(Learner):
    vocab_size = 1000

    def load(self, folder):
        self.events.append(f"load {folder.name}")

    def stop(self, is_finished):
        self.events.append("stop")


class Scene:
    """A run of N = 2, G = 2, K = 2 with a checkpoint every step, and who works on it."""

    def __init__(self, atlas_config, folder, *overrides):
        small = ["--pool.questions", "2", "--pool.rollouts", "2", "--method.budget", "2", "--loss.minibatch", "2"]
        small += ["--run.steps", "2", "--learner.checkpoint_every", "1", "--run.folder", str(folder)]
        redis = ["--redis.url", f"redis://127.0.0.1:{free_port()}/0"]  # another one for each scene; nothing asks it
        self.config = load_config(atlas_config, [*small, *redis, *overrides])
        self.events: list[str] = []
        self.run = MemoryRun()
        self.learner = Rank0(self.events)
        self.buffer = Buffer(self.run, self.config, self.events)
        self.at_make = lambda: None
        self.team = SimpleNamespace(
            silent=lambda after_s: [],
            is_asked_to_stop=lambda: False,
            tell=lambda told: self.events.append(f"tell {self.named(told.decode())}"),
            close=lambda: self.events.append("close"),
        )

    def named(self, told: str) -> str:
        """What another rank is told: the settings, or a checkpoint's name."""
        return "settings" if "\n" in told and of_toml(told) == self.config else told.rpartition("/")[2]

    def make_learner(self, config, team):
        self.events.append("make")
        self.at_make()
        return self.learner

    @asynccontextmanager
    async def open_buffer(self, config, patience_s, stop=None, vocab_size=None, identity=NOBODY):
        self.buffer._identity = identity
        yield self.buffer

    def lead(self, accept_changes=False):
        self.events.clear()
        self.leader(accept_changes).lead(self.make_learner)

    def leader(self, accept_changes=False):
        return Leader(self.open_buffer, self.team, QUESTIONS, CONTRACT, self.config, accept_changes)

    def another(self):
        """A buffer of another process."""
        return MemoryBuffer(self.run, limits_of(self.config), CONTRACT)


@pytest.fixture
def scene(atlas_config, tmp_path):
    return lambda *overrides: Scene(atlas_config, tmp_path / "run", *overrides)


def go_on(scene: Scene, *overrides: str, atlas_config) -> None:
    """The learner starts again, with other settings."""
    scene.config = Scene(atlas_config, scene.config.folder, *overrides).config
    scene.buffer = Buffer(scene.run, scene.config, scene.events)


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_first_start_takes_the_run_over_before_it_writes_anything(scene):
    s = scene("--run.steps", "1")
    s.lead()
    behind = ["announce v000001-e1"]
    assert [event for event in s.events if event not in behind] == [
        *("tell settings", "make", "tell ", "recover 0", "announce v000000-e1", "claim 0", "update 0", "commit 0"),
        *("capture .unfinished-step000001-e1", "write .unfinished-step000001-e1", "forget 0", "forget 0"),
        *("stop", "close"),
    ]
    assert s.events.index("commit 0") < s.events.index(*behind) < s.events.index("stop")
    assert s.buffer.on_disk == set()
    (start,) = read_starts(s.config.folder)
    assert (start.epoch, start.step, start.contract) == (1, 0, CONTRACT.terms)


def test_a_later_start_goes_on_from_the_newest_checkpoint(scene, atlas_config):
    s = scene()
    s.lead()
    go_on(s, "--run.steps", "3", atlas_config=atlas_config)
    s.lead()
    beside = "announce v000002-e2"  # workers play with version 2 of the first epoch until then
    ordered = [event for event in s.events if event != beside]
    assert ordered[:6] == ["tell settings", "make", "tell step000002-e1", "load step000002-e1", "recover 2", "claim 2"]
    assert s.events.index("recover 2") < s.events.index(beside)
    assert [(start.epoch, start.step) for start in read_starts(s.config.folder)] == [(1, 0), (2, 2)]
    assert not any("e2" in name for name in s.buffer.on_disk)


@pytest.mark.parametrize(("order", "resumed"), [("ticket", 2), ("deferred", 1)])
def test_a_redis_that_has_lost_a_step_does_not_undo_training_in_ticket_order(scene, atlas_config, order, resumed):
    """It went back to the newest checkpoint that Redis knew, and deleted the later ones: with the best one kept, by
    any number of steps. In another order Redis would give trained trajectories again."""
    s = scene("--pool.order", order)
    s.lead()
    s.run.state = replace(s.run.state, step=1, checkpoint=1)
    go_on(s, "--pool.order", order, "--run.steps", "3", atlas_config=atlas_config)
    s.lead()
    assert [event for event in s.events if event.startswith(("load", "recover"))] == [
        f"load step00000{resumed}-e1",
        f"recover {resumed}",
    ]


def test_what_is_half_done_goes_before_anything_is_written(scene, atlas_config, monkeypatch):
    """It may fill the disk: then no learner could start again."""
    s = scene()
    s.lead()
    half = s.config.folder / "checkpoints" / ".unfinished-step000009-e1"
    half.mkdir()

    def full(*_):
        raise WriteFailed("No space left on device" + (" for it" if half.exists() else ""))

    monkeypatch.setattr(takeover, "record_start", full)
    go_on(s, "--run.steps", "3", atlas_config=atlas_config)
    with pytest.raises(WriteFailed, match=r"No space left on device$"):
        s.lead()


def test_checkpoints_are_verified_before_the_learner_is_made(scene, caplog):
    s = scene()
    s.lead()
    folder = s.config.folder / "checkpoints"
    (folder / "step000002-e1" / "model" / "weights").write_text("9")
    caplog.set_level(logging.INFO)
    s.at_make = lambda: s.events.append("resuming from step 1" if "resuming from step 1" in caplog.text else "?")
    s.lead()
    assert s.events[:5] == ["tell settings", "make", "resuming from step 1", "tell step000001-e1", "load step000001-e1"]
    assert "step000002-e1 is damaged (model/weights); it is skipped" in caplog.text
    for path in folder.glob("*/model/weights"):
        path.write_text("9")
    with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
        s.lead()
    assert s.events == []


def test_a_checkpoint_that_is_deleted_while_the_learner_is_made_is_looked_up_again(scene):
    s = scene()
    s.lead()
    s.at_make = (s.config.folder / "checkpoints" / "step000002-e1" / "state.json").unlink
    s.lead()
    assert s.events[:5] == ["tell settings", "make", "tell step000001-e1", "load step000001-e1", "recover 1"]


@pytest.mark.parametrize("before", [0, 2])
def test_a_checkpoint_that_another_learner_saves_while_this_one_is_made_is_continued(scene, atlas_config, before):
    """Its steps were trained again, and it was deleted: the one that was found first was there still, or was none."""
    s = scene()
    if before:
        s.lead()
        go_on(s, "--run.steps", "9", atlas_config=atlas_config)
    other, step = checkpoints_of(s.config), before + 1

    def saves():
        other.begin(1, before)
        state = state_at(step, initial_method_state(s.config.method, s.config.episode.s_max), s.config)
        other.begin_write(step)
        with other.write(state):
            pass
        other.finish(step)

    s.at_make = saves
    s.lead()
    assert s.events[2:5] == [f"tell step00000{step}-e1", f"load step00000{step}-e1", f"recover {step}"]


def test_changed_settings_are_refused_before_the_learner_is_made(scene, atlas_config):
    s = scene()
    s.lead()
    go_on(s, "--learner.lr", "0.5", atlas_config=atlas_config)
    with pytest.raises(ConfigError, match=r"learner.lr is 0.5 here and 5e-05 in the run.*--accept-changes"):
        s.lead()
    assert s.events == []
    s.lead(accept_changes=True)
    assert s.events[:3] == ["tell settings", "make", "tell step000002-e1"]


def test_a_run_of_another_contract_is_refused_before_the_learner_is_made_unless_accepted(scene):
    s = scene()
    other = MemoryBuffer(s.run, limits_of(s.config), Identity(CONTRACT.terms | {"run.seed": "7"}))
    at_once(other.recover(0))
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        s.lead()
    assert s.events == []
    at_once(other.checkpoint(0))  # it has not been fenced off
    s.lead(accept_changes=True)
    assert s.events[:4] == ["tell settings", "make", "tell ", "recover 0"]
    with pytest.raises(Fenced):
        at_once(other.checkpoint(0))


@pytest.mark.parametrize("accept_changes", [False, True])
def test_another_run_of_this_name_is_refused_before_the_learner_is_made(scene, accept_changes):
    s = scene()
    its = replace(CONTRACT, run_id="its-id", host="elsewhere", folder="/runs/its")
    at_once(MemoryBuffer(s.run, limits_of(s.config), its).recover(0))
    with pytest.raises(ContractMismatch, match=r"run\.folder is .* here and /runs/its on elsewhere in the run"):
        s.lead(accept_changes)
    assert s.events == []
    assert files_in(s.config.folder) == set()


def test_the_run_is_that_of_its_folder_from_then_on(scene):
    s = scene("--run.steps", "1")
    marker = run_folder.mark(s.config.folder, s.config.run.name)
    s.lead()
    assert s.run.identity == replace(CONTRACT, run_id=marker.id).in_folder(s.config.folder)


def test_the_other_ranks_are_stopped_when_training_fails(scene):
    s = scene()

    def refuse(step):
        raise NonFiniteUpdate("refused")

    s.learner.at_update = refuse
    with pytest.raises(NonFiniteUpdate):
        s.lead()
    assert s.events[-2:] == ["update 0", "stop"]


def test_a_signal_ends_the_run_behind_its_step_with_a_checkpoint(scene):
    s = scene("--run.steps", "50")
    s.learner.at_update = lambda step: os.kill(os.getpid(), signal.SIGTERM)
    s.lead()
    announced_behind = "announce v000001-e1"
    assert announced_behind in s.events
    ordered = [event for event in s.events if event != announced_behind]
    assert ordered[-4:] == ["forget 0", "forget 0", "stop", "close"]
    assert checkpoints_of(s.config).latest().state.step == 1


def test_a_learner_that_was_replaced_says_by_whom(scene):
    s = scene()

    def replace(step):
        successor = s.another()
        at_once(successor.recover(0))
        at_once(successor.learner_heartbeat(ELSEWHERE))

    s.learner.at_update = replace
    with pytest.raises(Fenced, match=r"taken over \(it is epoch 2 on elsewhere, process 7\)$"):
        s.lead()
    assert s.events[-2:] == ["update 0", "stop"]


async def test_a_successor_that_does_not_say_who_it_is_is_not_named(scene, monkeypatch):
    monkeypatch.setattr(takeover, "BEAT_S", 0.1)
    s = scene()
    await s.buffer.recover(0)
    await s.buffer.learner_heartbeat(LearnerStatus(epoch=1, host="here", pid=1, step=0))
    await s.another().recover(0)
    assert str(await explain(s.buffer, Fenced("another learner has taken over"))) == "another learner has taken over"


async def test_a_write_that_failed_because_a_successor_cleared_up_is_told_as_that(scene):
    s = scene()
    await s.buffer.recover(0)
    failed = WriteFailed("cannot write")
    assert await explain(s.buffer, failed) is failed
    successor = s.another()
    await successor.recover(0)
    await successor.learner_heartbeat(ELSEWHERE)
    error = await explain(s.buffer, failed)
    assert isinstance(error, Fenced)
    assert "epoch 2 on elsewhere" in str(error)


async def taken_over(s: Scene) -> Leader:
    start = state_at(0, initial_method_state(s.config.method, s.config.episode.s_max), s.config)
    leader = s.leader()
    await leader.take_over(s.buffer, WeightStore(s.config.folder / "weights"), start)
    return leader


async def test_a_learner_that_may_be_alive_is_named(scene, caplog):
    s = scene()
    older = s.another()
    await older.recover(0)
    await older.learner_heartbeat(LearnerStatus(epoch=1, host="elsewhere", pid=7, step=1))
    s.run.now += 3.0
    await taken_over(s)
    assert (
        "epoch 2 takes over from a learner that may be alive (epoch 1 on elsewhere, process 7, last heard of 3.0 s ago)"
    ) in caplog.text
    with pytest.raises(Fenced):
        await older.checkpoint(0)


@pytest.mark.parametrize("left", ["checkpoints/.unfinished-step000001-e6", "weights/.unfinished-v000001-e6"])
async def test_the_epoch_is_above_all_that_the_folder_knows_of_and_what_is_half_done_is_cleared(scene, left):
    """Though Redis has forgotten them."""
    s = scene()
    half = s.config.folder / left
    half.mkdir(parents=True)
    await taken_over(s)
    assert s.buffer.epoch == 7
    assert not half.exists()


async def test_a_run_that_cannot_be_taken_over_is_left_as_it_is(scene):
    s = scene()
    earlier = s.another()
    await earlier.recover(0)
    await earlier.checkpoint(4)
    half = s.config.folder / "checkpoints" / ".unfinished-step000005-e1"
    half.mkdir(parents=True)
    with pytest.raises(ConfigError, match="the pools before step 4 are forgotten"):
        await taken_over(s)
    assert half.exists()
    assert files_in(s.config.folder) == {"takeover.lock"}


async def test_a_learner_that_was_overtaken_while_it_loaded_is_told_to_start_again(scene):
    """Before, it was advised to reset the run."""
    s = scene()
    older = s.another()
    await older.recover(0)
    await older.learner_heartbeat(LearnerStatus(epoch=1, host="elsewhere", pid=7, step=5))
    await older.checkpoint(4)
    with pytest.raises(ConfigError, match=r"step 0 is too old now: .*on elsewhere, process 7.* start this one again"):
        await taken_over(s)
    await older.checkpoint(5)


def with_another_redis(s: Scene, atlas_config, *overrides: str) -> Scene:
    """Of the same folder."""
    other = Scene(atlas_config, s.config.folder, "--run.steps", "4", *overrides)
    assert other.config.redis.url != s.config.redis.url
    return other


def test_a_second_redis_for_one_folder_is_refused_before_the_learner_is_made(scene, atlas_config):
    """Before: both trained to the end, their checkpoints were mixed, and a restart jumped ten steps."""
    s = scene()
    s.lead()
    kept = {name: (s.config.folder / name).read_bytes() for name in files_in(s.config.folder)}
    other = with_another_redis(s, atlas_config)
    with pytest.raises(ConfigError) as refused:
        other.lead()
    assert re.fullmatch(
        r"this process does not match run 'atlas': redis\.url is redis://127\.0\.0\.1:\d+/0 on .* here and "
        r"redis://127\.0\.0\.1:\d+/0 on .* in the run; use the .*; if that Redis is gone and no learner of it "
        r"\(the last had epoch 1\) is alive, --accept-changes continues from the newest checkpoint",
        str(refused.value),
    )
    assert other.events == []
    assert {name: (s.config.folder / name).read_bytes() for name in files_in(s.config.folder)} == kept

    other.lead(accept_changes=True)  # the operator says that the first Redis is gone
    assert [event for event in other.events if event.startswith("recover")] == ["recover 2"]
    s.buffer = Buffer(s.run, s.config, s.events)
    with pytest.raises(ConfigError, match="the last had epoch 2"):
        s.lead()


def test_a_redis_that_has_lost_its_data_goes_on_from_the_checkpoint_of_its_folder(scene, atlas_config, caplog):
    s = scene()
    s.lead()
    go_on(s, "--run.steps", "3", "--redis.url", s.config.redis.url, atlas_config=atlas_config)
    s.buffer = Buffer(MemoryRun(), s.config, s.events)
    s.lead()
    assert "recover 2" in s.events
    assert "has no record of this folder's learner of epoch 1; continuing" in caplog.text
    assert s.buffer.epoch == 2


async def test_two_learners_that_start_at_once_with_two_redis_do_not_both_take_the_folder_over(scene, atlas_config):
    s = scene()
    other = with_another_redis(s, atlas_config)
    with run_folder.hold_for_take_over(s.config.folder, 5.0):
        taking = asyncio.create_task(asyncio.to_thread(asyncio.run, taken_over(other)))
        await s.buffer.recover(0)
        record_start(s.config, s.buffer.epoch, 0, CONTRACT, s.buffer.nonce)
    with pytest.raises(ConfigError, match="the last had epoch 1"):
        await taking


def test_a_take_over_does_not_wait_for_ever_for_another(tmp_path):
    with (
        run_folder.hold_for_take_over(tmp_path, 5.0),
        pytest.raises(RunInUse, match=r"has been taking over the run in .* for 0 s"),
        run_folder.hold_for_take_over(tmp_path, 0.0),
    ):
        pass
