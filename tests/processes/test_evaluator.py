"""The evaluator process on a run in memory: what it scores, and when it ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest

from cusearch_async.errors import ContractMismatch, LearnerUnreachable, WeightsUnavailable
from cusearch_async.evaluation.scores import set_others_aside
from cusearch_async.files import append_row
from cusearch_async.lifecycle.gpu_share import GpuShare
from cusearch_async.metrics.files import read_scores
from cusearch_async.run.history import epochs_and_steps, record_start
from cusearch_async.run.identity import Identity
from cusearch_async.transport.memory import MemoryBuffer
from cusearch_async.weights.folder import WeightStore
from tests.processes.scene import CLOSED, Engine, Scene
from tests.rollout.workers import until
from tests.transport.filling import start


@pytest.fixture
async def learner(scene, monkeypatch) -> MemoryBuffer:
    return await begun(scene, monkeypatch)


async def begun(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> MemoryBuffer:
    """A learner that has announced its first weights."""
    monkeypatch.setattr(scene.evaluator, "POLL_S", 0.01)
    scene.retriever_answers.set()
    record_start(scene.config, epoch=1, step=0)
    learner = scene.learner()
    await start(learner)
    return learner


def scores(scene: Scene) -> dict[int, float]:
    """Version -> exact match over all questions."""
    rows = read_scores(scene.config.folder / "eval.jsonl", epochs_and_steps(scene.config.folder))
    return {row["step"]: row["all"]["em"] for row in rows}


async def look_again(scene: Scene) -> None:
    """Until the process has seen the run as it is now, and had the time to act on it."""
    seen = scene.looks
    await until(lambda: scene.looks >= seen + 3)


async def test_it_scores_what_is_due_and_ends_with_the_run(scene, learner):
    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: scores(scene) == {0: 1.0})
    await learner.announce(1, "v000001-e1")
    await look_again(scene)
    assert list(scores(scene)) == [0], "one step after the last"
    await learner.announce(2, "v000002-e1")
    await until(lambda: scores(scene) == {0: 1.0, 2: 1.0})
    await learner.announce(4, "v000004-e1")
    await until(lambda: list(scores(scene)) == [0, 2, 4])
    await look_again(scene)
    assert not working.done(), "a learner may still go back behind the last version"
    await finish(scene, learner, 4)
    assert await working
    assert scene.events[-1] == CLOSED


async def test_a_last_version_that_cannot_be_scored_is_not_called_scored(scene, learner, monkeypatch, caplog):
    """A question of it had failed: the evaluator ended as one whose work is done."""

    async def fails(*_):
        return None

    monkeypatch.setattr(scene.evaluator, "score_all", fails)
    async with scene.running("evaluator") as working:
        await learner.announce(4, "v000004-e1")
        await finish(scene, learner, 4)
        assert not await working
    assert "its last version is scored" not in caplog.text


@pytest.mark.parametrize("rank", [0, 4])
async def test_the_first_adapter_is_checked_with_the_model_that_it_is_put_on(make_scene, monkeypatch, tmp_path, rank):
    """That is this machine's model.path: an older copy was scored, and nothing showed it."""
    checked, load = [], Engine.load

    async def noting(self, store, name, check):
        checked.append(check)
        await load(self, store, name, check)

    monkeypatch.setattr(Engine, "load", noting)
    (tmp_path / "lora.toml").write_text(f"[learner.lora]\nrank = {rank}\n")
    scene = make_scene(tmp_path / "lora.toml")
    learner = await begun(scene, monkeypatch)
    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: scores(scene) == {0: 1.0})
    await learner.announce(2, "v000002-e1")
    await until(lambda: scores(scene) == {0: 1.0, 2: 1.0})
    scene.stop.set()
    await working
    assert checked == [rank > 0, False]


async def test_one_that_is_stopped_while_it_waits_for_a_run_leaves_its_scores(scene):
    """It took no run for another one: their curve began anew."""
    set_others_aside(scene.config.folder, "this run")
    append_row(scene.config.folder / "eval.jsonl", {"step": 2, "epoch": 1, "all": {"em": 0.5}})
    scene.retriever_answers.set()
    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: scene.looks >= 3)
    scene.stop.set()
    assert not await working, "its run is not over: Kubernetes took one that was drained for done"
    set_others_aside(scene.config.folder, "this run")
    assert (scene.config.folder / "eval.jsonl").exists()


async def finish(scene: Scene, learner: MemoryBuffer, step: int) -> None:
    scene.run.state = replace(scene.run.state, step=step)
    await learner.finish()


async def test_a_finished_run_whose_last_version_is_not_scored_yet_is_waited_for(scene, learner, caplog):
    """Also when the run has fewer steps than the evaluator's own config says."""
    caplog.set_level("INFO")
    scene.engine_answers.clear()
    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: scene.prompts)
    await learner.announce(3, "v000003-e1")
    await finish(scene, learner, 3)
    scene.engine_answers.set()
    await working
    assert list(scores(scene)) == [0, 3]
    assert caplog.messages[-1] == "run atlas is finished and its last version is scored; the evaluator ends"


async def test_an_evaluator_of_a_run_that_a_learner_continues_does_not_end_with_its_earlier_finish(scene, learner):
    await finish(scene, learner, 2)
    await learner.announce(2, "v000002-e1")
    async with scene.running("evaluator") as working:
        await until(lambda: list(scores(scene)) == [2])
        await look_again(scene)
        assert not working.done(), "its own config says four steps"
        continuing = scene.learner()
        await continuing.recover(2)
        await continuing.announce(4, "v000004-e2")
        await finish(scene, continuing, 4)
        await working
    assert 4 in scores(scene)


async def test_one_that_is_stopped_while_it_scores_writes_no_row(scene, learner):
    scene.engine_answers.clear()
    async with scene.running("evaluator"):
        await until(lambda: scene.prompts)
    assert scores(scene) == {}
    assert scene.events[-1] == CLOSED


async def test_a_colocated_learner_has_its_turn_between_rounds(scene, learner):
    """It waited for the whole evaluation, and ended after run.stall_s, again after each restart."""
    run = scene.config.run.model_copy(update={"colocate": True})
    held = scene.config.eval.model_copy(update={"at_once": 2})
    config = scene.config.model_copy(update={"run": run, "eval": held})
    turns = []

    class Lock:
        async def take(self):
            turns.append("take")

        def release(self):
            turns.append("release")

    async def nothing():
        pass

    share = GpuShare(Lock(), nothing, nothing)

    async def score(runner, questions, version, at_once, first):
        turns.append(first)
        return list(questions)

    own = scene.evaluator.Evaluator.__new__(scene.evaluator.Evaluator)
    own._config, own._engine, own._runner, own._questions = config, share, None, [*"abcde"]
    with patch.object(scene.evaluator, "score_all", score):
        assert await own._score(3) == [*"abcde"]
    assert turns[:7] == [0, "release", "take", 2, "release", "take", 4]


async def test_it_ends_when_a_learner_changes_the_run(scene, learner):
    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: scores(scene) == {0: 1.0})
    other = scene.learner(Identity({"run.seed": "7"}))
    await other.recover(0, accepts_changes=True)
    await other.announce(2, "v000002-e2")
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await working
    assert list(scores(scene)) == [0]
    assert scene.events[-1] == CLOSED


async def test_in_order_a_version_that_stays_damaged_is_not_waited_for(scene, learner, caplog):
    """It was, for ever, and so was the evaluator's end."""
    scene.config = scene.config.model_copy(
        update={
            "eval": scene.config.eval.model_copy(update={"in_order": True}),
            "redis": scene.config.redis.model_copy(update={"outage_s": 0.3}),
        }
    )
    load = Engine.load

    async def damaged(own, store, name, check):
        if name.startswith("v000002"):
            raise WeightsUnavailable(f"{name} is damaged")
        await load(own, store, name, check)

    async with scene.running("evaluator"):
        await until(lambda: 0 in scores(scene))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Engine, "load", damaged)
            (scene.config.weights_folder / "v000002-e1").mkdir(parents=True)
            await learner.announce(2, "v000002-e1")
            await look_again(scene)
            await learner.announce(4, "v000004-e1")
            await until(lambda: 4 in scores(scene))
    assert list(scores(scene)) == [0, 4]
    assert "version 2 is not scored: v000002-e1 is damaged" in caplog.text


async def test_a_learner_that_is_gone_after_its_finish_is_not_waited_for(scene, learner, caplog, monkeypatch):
    """One that serves its versions. It was, without end; of a run that is not finished the next one may come."""
    scene.config = scene.config.model_copy(
        update={
            "eval": scene.config.eval.model_copy(update={"in_order": True}),
            "redis": scene.config.redis.model_copy(update={"outage_s": 0.1}),
        }
    )
    load = Engine.load

    async def gone(*_):
        raise LearnerUnreachable("the learner does not answer")

    async def only_the_first(own, store, name, check):
        await (load(own, store, name, check) if name == "v000000-e1" else gone())

    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: 0 in scores(scene))
    monkeypatch.setattr(Engine, "load", only_the_first)
    monkeypatch.setattr(WeightStore, "newest_of", gone)
    monkeypatch.setattr(scene.evaluator, "LOOK_AGAIN_S", 0.01)
    await learner.announce(4, "v000004-e1")
    await finish(scene, learner, 4)
    with pytest.raises(WeightsUnavailable, match=r"the learner does not answer; no other version .* for 0\.1 s"):
        await working
    assert "version 2 is not scored: the learner does not answer" in caplog.text


async def test_after_the_finish_one_lost_connection_drops_no_version(scene, learner, caplog, monkeypatch):
    """One of each: what was answered in between began no outage."""
    update = {
        "eval": scene.config.eval.model_copy(update={"in_order": True}),
        "run": scene.config.run.model_copy(update={"steps": 6}),
        "redis": scene.config.redis.model_copy(update={"outage_s": 0.05}),
    }
    scene.config = scene.config.model_copy(update=update)
    for version in (2, 4):
        (scene.config.weights_folder / f"v00000{version}-e1").mkdir(parents=True)
    fails, newest_of = {2, 4}, WeightStore.newest_of

    async def reset_once(own, version):
        await asyncio.sleep(0.1 * (version == 4 and 4 in fails))
        if version in fails:
            fails.remove(version)
            raise LearnerUnreachable("connection reset")
        return await newest_of(own, version)

    working = asyncio.create_task(scene.process("evaluator"))
    await until(lambda: 0 in scores(scene))
    monkeypatch.setattr(WeightStore, "newest_of", reset_once)
    monkeypatch.setattr(scene.evaluator, "LOOK_AGAIN_S", 0.01)
    await learner.announce(6, "v000006-e1")
    await finish(scene, learner, 6)
    await working
    assert list(scores(scene)) == [0, 2, 4, 6]
    assert not fails


async def test_in_order_it_scores_every_version_however_late(scene, learner, caplog, monkeypatch):
    """Version 2 was announced and replaced while it looked away; its weights are there, those of version 4 are not."""
    scene.config = scene.config.model_copy(
        update={
            "eval": scene.config.eval.model_copy(update={"in_order": True}),
            "run": scene.config.run.model_copy(update={"steps": 7}),
        }
    )
    (scene.config.weights_folder / "v000002-e1").mkdir(parents=True)
    fails, newest_of = [True, True], WeightStore.newest_of

    async def away(own, version):
        if fails:
            fails.pop()
            raise WeightsUnavailable("cannot list s3://x: 503")
        return await newest_of(own, version)

    monkeypatch.setattr(scene.evaluator, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(WeightStore, "newest_of", away)
    await learner.announce(6, "v000006-e1")
    async with scene.running("evaluator"):
        await until(lambda: 6 in scores(scene))
    assert list(scores(scene)) == [2, 6]
    assert not fails, "versions may be listed over a network"
    for version in (0, 4):
        assert f"version {version} is not scored: its weights are no longer there" in caplog.text
