"""The whole training loop, on the buffer in memory, with a learner that writes down what it is told."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cusearch_async.algorithm.methods.sdga import SdgaMemory
from cusearch_async.config import load_config
from cusearch_async.errors import BufferLost, BufferUnavailable, Fenced, NonFiniteUpdate, NothingLearned, WriteFailed
from cusearch_async.lifecycle.gpu_share import gpu_lock
from cusearch_async.metrics.files import read_metrics
from cusearch_async.training import watchdog
from cusearch_async.training.background import in_thread
from cusearch_async.training.checkpoint import Checkpoints, state_at
from cusearch_async.training.heartbeat import Heartbeat
from cusearch_async.training.loop import train
from cusearch_async.training.report import StepReport
from cusearch_async.training.selector import candidates_of, initial_method_state, method_state, select
from cusearch_async.training.takeover import explain
from cusearch_async.transport.interface import WorkerStatus
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.types import Pool
from cusearch_async.weights.folder import WeightStore
from tests.conftest import SLOW
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS, Learner, Recorded, at_once


@pytest.fixture
def setting(atlas_config, tmp_path):
    """A run of three steps of N = 2, G = 2, K = 2, with a checkpoint every second."""

    def make(*overrides):
        small = ["--pool.questions", "2", "--pool.rollouts", "2", "--method.budget", "2", "--loss.minibatch", "2"]
        small += ["--run.steps", "3", "--learner.checkpoint_every", "2", "--run.folder", str(tmp_path)]
        config = load_config(atlas_config, [*small, *overrides])
        events: list[str] = []
        return SimpleNamespace(
            config=config,
            events=events,
            ranks=SimpleNamespace(silent=lambda after_s: [], is_asked_to_stop=lambda: False),
            learner=Learner(events),
            run=MemoryRun(),
            checkpoints=Checkpoints(config.folder, config.learner.keep_checkpoints),
            stop=asyncio.Event(),
            store=WeightStore(config.folder / "weights"),
            depth_of=lambda ticket, rollout: 1 + (ticket + rollout) % 3,
        )

    return make


async def start(s, step=0, method=None, buffer=Recorded):
    """The learner takes the run over at `step`, as `processes.learner` does, and trains."""
    s.loop = asyncio.get_running_loop()
    method = method or initial_method_state(s.config.method, s.config.episode.s_max)
    s.buffer = buffer(s.run, s.config, s.events, s.depth_of)
    await s.buffer.recover(step, method)
    s.checkpoints.begin(s.buffer.epoch, step)
    store = s.store
    began = state_at(step, method, s.config)
    lock = gpu_lock(s.config, "learner")
    if lock is not None:
        await lock.take()
        s.buffer.gpus = gpu_lock(s.config, "engine")
    s.heartbeat = Heartbeat(s.buffer, s.ranks, 60, 60, asyncio.Event())
    async with s.heartbeat, in_thread(s.learner, lock) as learner:
        await train(learner, s.buffer, store, s.checkpoints, began, QUESTIONS, s.config, s.heartbeat, s.stop)


async def test_an_error_of_the_heartbeat_ends_the_run(setting):
    s = setting()

    def silent(after_s):
        raise TypeError("a rank has no name")

    s.ranks.silent = silent
    with pytest.raises(TypeError, match="a rank has no name"):
        await start(s)
    assert not s.run.state.is_finished


async def test_a_disk_that_takes_no_records_does_not_end_the_run(setting, caplog):
    s = setting()
    (s.config.folder / "records").write_text("in the way")
    await start(s)
    assert rows(s) == [0, 1, 2]
    assert "step 2 is not recorded: WriteFailed: cannot write" in caplog.text
    assert [path.name for path in s.checkpoints.folder.glob("step000003*")] == ["step000003-e1"]


def rows(s):
    return [row["step"] for row in read_metrics(s.config.folder / "metrics.jsonl")]


async def test_a_step_is_claimed_trained_on_committed_published_and_only_then_saved(setting, caplog, monkeypatch):
    s = setting("--pool.max_staleness", "0")
    write = StepReport.write

    async def noting(own, chosen, *figures):
        s.events.append(f"row {chosen.pool.step}")
        return await write(own, chosen, *figures)

    monkeypatch.setattr(StepReport, "write", noting)
    with caplog.at_level(logging.INFO):
        await start(s)
    captured = s.events.index("capture .unfinished-step000002-e1")
    assert s.events.index("row 1") < captured, "a step is made once: after a crash between the two it would have no row"
    s.events = [event for event in s.events if not event.startswith("row")]
    of_steps = ("claim", "update", "commit", "announce")
    assert [event for event in s.events if event.startswith(of_steps)] == [
        "announce v000000-e1",
        *("claim 0", "update 0", "commit 0", "announce v000001-e1"),
        *("claim 1", "update 1", "commit 1", "announce v000002-e1"),
        *("claim 2", "update 2", "commit 2", "announce v000003-e1"),
    ]
    assert [event for event in s.events if not event.startswith(of_steps)] == [
        *("capture .unfinished-step000002-e1", "write .unfinished-step000002-e1", "forget 0", "forget 0"),
        *("capture .unfinished-step000003-e1", "write .unfinished-step000003-e1", "forget 0", "forget 2"),
    ]
    assert s.events.index("commit 1") < s.events.index("capture .unfinished-step000002-e1") < s.events.index("update 2")
    assert rows(s) == [0, 1, 2]
    assert s.heartbeat.step == 2
    assert "finished at step 3; checkpoint saved" in caplog.text
    assert s.run.state.is_finished
    ledger = await s.buffer.ledger()
    assert (ledger.trained, ledger.unselected, ledger.closes) == (6, 6, True)
    assert s.checkpoints.latest().state.step == 3


@pytest.mark.parametrize("staleness", ["0", "1"])
async def test_where_it_takes_turns_the_learner_has_the_gpus_from_an_update_until_its_weights_are_written(
    setting, staleness
):
    s = setting("--run.colocate", "true", "--learner.reference", "cpu", "--pool.max_staleness", staleness)
    await start(s)
    whole = ("update", "announce", "capture", "generate", "offload", "reload")
    turns = " ".join(event.split()[0] for event in s.events if event.startswith(whole)).split("offload")
    at_first, *steps, at_last = [turn.split() for turn in turns]
    assert at_first == ["announce"], "it is awake when it starts"
    assert all(turn.count("generate") >= 1 and turn.index("generate") == 0 for turn in steps[: 2 - int(staleness)]), (
        turns
    )
    learners = [[event for event in turn if event != "generate"] for turn in steps]
    assert [turn[:2] for turn in learners] == [*[["reload", "update"]] * 3, ["reload", "capture"]]
    after_updates = [sorted(turn[2:]) for turn in learners]  # a version is announced beside a checkpoint's capture
    assert after_updates == [["announce"], ["announce", "capture"], ["announce"], []]
    assert at_last == []


async def test_the_learner_is_called_in_one_thread_that_is_not_the_event_loops(setting):
    s = setting()
    threads = set()
    s.learner.at_update = lambda step: threads.add(threading.current_thread())
    await start(s)
    assert threads == {s.learner.thread} != {threading.current_thread()}


async def test_weights_are_written_while_the_next_step_is_trained_on(setting):
    s = setting("--pool.max_staleness", "1")
    publish, may_write = s.store.publish, threading.Event()

    def publish_late(version, *arguments):
        if version == 1:
            assert may_write.wait(10 * SLOW)
        return publish(version, *arguments)

    s.store.publish = publish_late
    s.learner.at_update = lambda step: may_write.set() if step == 1 else None
    await start(s)
    assert s.events.index("update 1") < s.events.index("announce v000001-e1") < s.events.index("announce v000002-e1")
    assert rows(s) == [0, 1, 2]
    assert not s.learner.is_lent


async def test_a_canary_that_fails_ends_the_run_and_gives_the_weights_back(setting):
    s = setting()

    def fail():
        raise RuntimeError("out of memory")

    s.learner.canary = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        await asyncio.wait_for(start(s), 20 * SLOW)
    assert not s.learner.is_lent


async def test_a_checkpoint_is_written_while_the_next_step_is_trained_on(setting):
    s = setting()
    capture, may_write = s.learner.capture, threading.Event()

    def capture_and_write_late(folder):
        write = capture(folder)
        return lambda: (may_write.wait(10 * SLOW), write())

    s.learner.capture = capture_and_write_late
    s.learner.at_update = lambda step: may_write.set() if step == 2 else None
    await start(s)
    assert s.events.index("commit 1") < s.events.index("update 2") < s.events.index("write .unfinished-step000002-e1")
    assert s.checkpoints.latest().state.step == 3
    assert (s.config.folder / "checkpoints" / "step000002-e1" / "model" / "weights").read_text() == "2"


@pytest.mark.parametrize("what", ["weights", "checkpoint"])
async def test_what_cannot_be_written_ends_a_run_that_waits_for_its_pool(setting, what, monkeypatch):
    monkeypatch.setattr(watchdog, "REPUBLISH_S", 1e9)
    s = setting("--pool.max_staleness", "0")

    def fail(*_):
        raise WriteFailed("cannot write it: no space left on device")

    if what == "weights":
        publish = s.store.publish
        s.store.publish = lambda version, *rest: fail() if version == 1 else publish(version, *rest)
    else:
        s.learner.capture = lambda folder: fail
    with pytest.raises(WriteFailed, match="no space left"):
        await asyncio.wait_for(start(s), 20 * SLOW)
    assert s.checkpoints.latest() is None


async def test_what_is_trained_on_is_the_methods_selection_with_its_advantages(setting):
    s = setting("--run.steps", "1")
    await start(s)
    pool = s.run.pools.get(0)
    trained = {id_ for id_ in pool.ids if s.run.entries[id_].state == "trained"}
    assert trained == {t.id for t in s.learner.selected}
    assert len(s.learner.advantages) == 2
    method, everyone = s.config.method.make(), [s.run.entries[id_].trajectory for id_ in pool.ids]
    candidates = candidates_of(Pool(0, tuple(everyone)), 5)
    again = select(candidates, 0, method, method.decode("", 5), s.config.method, s.config.run.seed)
    assert [everyone[i].id for i in again.indices] == [t.id for t in s.learner.selected]


def test_a_number_as_reward_passes_as_an_exact_match_does():
    """Which has no F1: before, AR3PO saw nothing pass, and moved no rollouts."""
    rewarded = [make_trajectory(0, 0, f1=0.0, em=1.0), make_trajectory(0, 1, f1=0.0, em=0.0)]
    answered = [make_trajectory(1, 0, f1=0.4, em=0.0), make_trajectory(1, 1, f1=0.0, em=0.0)]
    assert candidates_of(Pool(0, (*rewarded, *answered)), 5).passed.tolist() == [True, False, True, False]


async def test_weights_are_published_as_often_as_asked_and_after_the_last_step(setting):
    s = setting("--learner.publish_every", "2", "--pool.max_staleness", "2")
    await start(s)
    assert [event for event in s.events if "announce" in event] == [
        *("announce v000000-e1", "announce v000002-e1", "announce v000003-e1")
    ]


async def test_a_stop_ends_the_run_behind_its_step_with_a_checkpoint(setting, caplog):
    s = setting()
    s.learner.at_update = lambda step: s.loop.call_soon_threadsafe(s.stop.set)
    with caplog.at_level(logging.INFO):
        await start(s)
    assert s.events[-6:] == [
        *("commit 0", "announce v000001-e1", "capture .unfinished-step000001-e1"),
        *("write .unfinished-step000001-e1", "forget 0", "forget 0"),
    ]
    assert rows(s) == [0]
    assert "stopped at step 1; checkpoint saved" in caplog.text


async def test_a_stop_before_anything_was_done_saves_nothing(setting):
    s = setting()
    s.stop.set()
    await start(s)
    assert s.events == ["announce v000000-e1"]
    assert s.checkpoints.latest() is None


async def test_an_update_that_is_refused_commits_nothing_and_its_pool_stays_claimed(setting):
    s = setting("--pool.max_staleness", "0")  # version 1 is announced before its pool is played

    def refuse(step):
        if step == 1:
            raise NonFiniteUpdate("step 1 is refused")

    s.learner.at_update = refuse
    with pytest.raises(NonFiniteUpdate, match=r"step 1 is refused, and their pool stays claimed.*buffer quarantine"):
        await start(s)
    assert s.events[-2:] == ["claim 1", "update 1"]
    assert rows(s) == [0]
    ledger = await s.buffer.ledger()
    assert (ledger.claimed, ledger.closes) == (4, True)


async def test_a_learner_that_was_replaced_meanwhile_writes_no_row_and_no_weights(setting):
    s = setting("--pool.max_staleness", "0")  # version 1 is announced before its pool is played
    successor = MemoryBuffer(s.run, limits_of(s.config))
    s.learner.at_update = lambda step: at_once(successor.recover(1)) if step == 1 else None
    with pytest.raises(Fenced):
        await start(s)
    assert s.events[-2:] == ["claim 1", "update 1"]
    assert rows(s) == [0]
    assert s.checkpoints.latest() is None


async def test_a_run_goes_on_from_its_checkpoint_with_what_the_method_remembered(setting):
    s = setting("--method.phase_reserve", "0")
    await start(s, 1, method_state(s.config.method.make(), SdgaMemory(2), {}, 5))
    assert s.events[:2] == ["announce v000001-e1", "claim 1"]
    assert rows(s) == [1, 2]
    assert (await s.buffer.state()).fields == {"phase": 2}


async def test_what_a_worker_did_before_the_learners_start_is_not_of_its_first_row(setting):
    """It outlives learners, and tells totals since its own start."""
    s = setting()
    worker = MemoryBuffer(s.run, limits_of(s.config))
    await worker.recover(0, initial_method_state(s.config.method, s.config.episode.s_max))
    await worker.heartbeat("old", [], WorkerStatus(version=0, alive_s=3600, searches=5000))
    await start(s)
    rows = read_metrics(s.config.folder / "metrics.jsonl")
    assert [row["rollout/searches"] for row in rows] == [0, 0, 0]


async def test_how_long_an_update_waited_for_weights_that_were_being_written_is_told(setting):
    s = setting()
    await start(s)
    assert [row["time/lent_s"] for row in read_metrics(s.config.folder / "metrics.jsonl")] == [0.25] * 3


async def test_the_speed_of_engines_is_told_only_while_they_have_questions(setting):
    """With staleness 1 all of a run of 3 steps have been given out once version 1 is published, in step 1's row."""
    s = setting("--pool.max_staleness", "1")
    await start(s)
    rows = read_metrics(s.config.folder / "metrics.jsonl")
    assert ["rollout/tokens_per_s" in row for row in rows] == [True, True, False]


WHY = "20 x the reward mine:reward failed: KeyError: 'X'"


class Failing(Recorded):
    """Its worker fails every episode, and tells why with its next heartbeat."""

    async def generate(self):
        for _ in range(self._limits.max_attempts):
            slots = await self.admit("w", 0, 100)
            await self.release("w", sorted({slot.ticket for slot in slots}), failed=True)
        status = WorkerStatus(failed_episodes=20, most_frequent_failure=WHY)
        asyncio.get_running_loop().call_later(0.05, lambda: self._run.workers.update(w=(status, 0.0)))


async def test_a_pool_of_which_all_episodes_failed_ends_the_run_with_their_error(setting, caplog):
    """Before: every step trained on nothing, the run succeeded, and recommended the start model."""
    s = setting()
    with pytest.raises(NothingLearned) as caught:
        await start(s, buffer=Failing)
    assert str(caught.value) == (
        f"step 0 has nothing to train on: all episodes of its 2 groups failed, 5 times each; most often: {WHY}"
    )
    assert (await s.buffer.state()).step == 0
    assert s.checkpoints.latest() is None
    await start(s)  # the reward is fixed now
    assert rows(s) == [0, 1, 2]


async def test_a_worker_that_says_nothing_of_its_failures_is_not_waited_for_long(setting, monkeypatch):
    monkeypatch.setattr(watchdog, "WORKERS_TELL_S", 0.05)
    s = setting()

    class Silent(Failing):
        async def workers(self):
            return {"w": WorkerStatus()}

    with pytest.raises(NothingLearned, match=r"failed, 5 times each, or are quarantined; see the logs of the workers"):
        await start(s, buffer=Silent)


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_a_run_in_which_no_trajectory_has_an_advantage_does_not_succeed(setting, reward):
    s = setting("--method.singleton", "zero")

    class Same(Recorded):
        async def put(self, trajectory):
            return await super().put(replace(trajectory, reward=reward))

    with pytest.raises(
        NothingLearned, match=r"^no trajectory of the 3 steps had an advantage: .* all rewards were equal"
    ):
        await start(s, buffer=Same)
    assert s.checkpoints.latest().state.step == 3, "nothing is lost"
    assert rows(s) == [0, 1, 2]


async def test_a_run_that_learns_from_entropy_needs_no_advantage(setting):
    s = setting("--method.singleton", "zero", "--loss.entropy_coef", "0.01")

    class Same(Recorded):
        async def put(self, trajectory):
            return await super().put(replace(trajectory, reward=0.0))

    await start(s, buffer=Same)
    assert rows(s) == [0, 1, 2]


async def test_a_trapped_phase_is_warned_about_in_its_step(setting, caplog):
    s = setting("--method.phase_reserve", "0", "--run.steps", "1")
    s.depth_of = lambda ticket, rollout: 2 if (ticket, rollout) == (1, 1) else 1
    await start(s)
    assert "step 0: the phase is trapped: depth 1 alone fills the budget" in caplog.text
    assert "method.phase_reserve" in caplog.text
    assert read_metrics(s.config.folder / "metrics.jsonl")[0]["selection/phase_trapped"] == 1


@pytest.mark.parametrize("of_redis", [BufferUnavailable("it is down"), BufferLost("a part is gone")], ids=repr)
async def test_a_write_that_failed_is_told_as_that_where_redis_cannot_be_asked(of_redis):
    """A full disk ends Redis, too, and the run was told to have ended for the lack of one."""

    async def checkpoint(step):
        raise of_redis

    failed = WriteFailed("cannot write it: No space left on device")
    assert await explain(SimpleNamespace(checkpoint=checkpoint), failed) is failed
