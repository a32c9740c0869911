"""What the page shows of a run in a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.config import load_config
from cusearch_async.dashboard.facts import lag
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.dashboard.live import Live
from cusearch_async.dashboard.prometheus import exposition
from cusearch_async.metrics.files import MetricsFile, ScoresFile
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerStatus, MethodState, WorkerStatus
from tests.conftest import free_port
from tests.strategies import make_trajectory


@pytest.fixture
def config(atlas_config, redis_url, request):
    return load_config(atlas_config, ["--run.name", f"page-{abs(hash(request.node.name))}", "--redis.url", redis_url])


def seen(config, *statuses: WorkerStatus, has_learner: bool = True) -> dict:
    async def fill_and_look() -> dict:
        async with open_buffer(config, identity=Identity({"run.seed": "0"})) as open_:
            await open_.recover(0, MethodState(fields={"phase": 2}))
            await open_.announce(0, "v000000-e1")
            await open_.admit("w0", 0, 6)
            for number, status in enumerate(statuses):
                await open_.heartbeat(f"w{number}", [0, 1] if number == 0 else [], status)
            await open_.put(make_trajectory(0, 0, depth=1))
            await open_.put(make_trajectory(0, 1, depth=3))
            if has_learner:
                await open_.learner_heartbeat(LearnerStatus(epoch=1, host="h", pid=7, step=0))
            async with Live(config, config.folder) as live:
                return await live.now()

    return asyncio.run(fill_and_look())


def now(config) -> dict:
    async def look() -> dict:
        async with Live(config, config.folder) as live:
            first = await live.now()
            assert first == await live.now(), "it can be asked again"
            return first

    return asyncio.run(look())


def test_it_has_the_buckets_the_ledger_and_the_processes(config):
    found = seen(config, WorkerStatus(version=0, in_flight=4, episodes=2))
    assert [row[0] for row in found["cells"]] == [0, 1, 0, 1, 0, 0]
    assert found["ledger"]["closes"]
    assert found["ledger"]["buffered"] == 2
    assert found["queues"]["needed"] == 64
    assert [(one["name"], one["is_alive"], one["in_flight"]) for one in found["workers"]] == [("w0", True, 4)]
    assert found["learner"]["pid"] == 7
    assert found["troubles"] == []


@pytest.mark.parametrize(
    ("status", "name", "said"),
    [
        (WorkerStatus(in_flight=4, last_token_age_s=90.0), "worker_stuck", "no token for 90 s"),
        (WorkerStatus(retriever_down_s=30.0), "retriever_down", "no answer from http://127.0.0.1:8765 for 30 s"),
    ],
)
def test_it_names_what_the_learner_cannot_see(config, status, name, said):
    (trouble,) = seen(config, WorkerStatus(), status)["troubles"]
    assert trouble["name"] == name
    assert said in trouble["text"]


def test_an_engine_hangs_when_its_leases_run_out(config):
    patient = config.model_copy(update={"redis": config.redis.model_copy(update={"lease_s": 300.0})})
    assert seen(patient, WorkerStatus(in_flight=4, last_token_age_s=100.0))["troubles"] == []


def test_prometheus_gets_the_workers(config):
    found = seen(config, WorkerStatus(version=0, in_flight=4, episodes=2))
    text = exposition("demo", {}, [], found).decode()
    assert 'cusearch_worker_episodes{run="demo",worker="w0"} 2.0' in text
    assert 'cusearch_worker_in_flight{run="demo",worker="w0"} 4.0' in text


def test_a_dead_worker_has_no_episodes_for_prometheus(config, monkeypatch):
    """It would be counted as busy for an hour, and keep autoscaling from replacing it."""
    monkeypatch.setattr("cusearch_async.transport.interface.ALIVE_S", 0.0)
    text = exposition("demo", {}, [], seen(config, WorkerStatus(version=0, in_flight=4, episodes=2))).decode()
    assert 'cusearch_worker_in_flight{run="demo",worker="w0"} 0.0' in text
    assert 'cusearch_worker_episodes{run="demo",worker="w0"} 2.0' in text


def test_it_names_a_worker_without_heartbeat_and_a_run_without_a_learner(config, monkeypatch):
    assert [one["name"] for one in seen(config, WorkerStatus(), has_learner=False)["troubles"]] == ["no_learner"]
    monkeypatch.setattr("cusearch_async.transport.interface.ALIVE_S", 0.0)
    assert "worker_silent" in [one["name"] for one in seen(config, WorkerStatus())["troubles"]]


def test_without_redis_or_a_run_it_says_so(config):
    assert "no learner has taken run" in now(config)["problem"]
    gone = config.redis.model_copy(update={"url": f"redis://:secret@127.0.0.1:{free_port()}/0"})
    problem = now(config.model_copy(update={"redis": gone}))["problem"]
    assert "cannot be reached" in problem
    assert "secret" not in problem


def test_another_run_of_the_same_name_is_not_taken_for_this_one(config, tmp_path):
    """An earlier demo that was moved aside, or a folder that was copied, has the name of the run that is alive."""
    alive = config.model_copy(update={"run": config.run.model_copy(update={"folder": tmp_path / "alive"})})
    for folder in (tmp_path / "alive", tmp_path / "aside"):
        run_folder.mark(folder, config.run.name)

    async def take_over() -> tuple[dict, dict]:
        async with open_buffer(alive, identity=Identity({}).in_folder(alive.folder)) as open_:
            await open_.recover(0)
            async with Live(config, tmp_path / "alive") as own, Live(config, tmp_path / "aside") as other:
                return await own.now(), await other.now()

    own, other = asyncio.run(take_over())
    assert "ledger" in own
    assert f"holds another run of the name {config.run.name!r}, of {alive.folder}" in other["problem"]


@pytest.mark.parametrize(
    ("every", "scored", "behind"), [(0, None, None), (5, 40, None), (5, 39, 11), (5, None, 50), (30, None, None)]
)
def test_an_evaluator_that_lags_is_named(tmp_path, every, scored, behind):
    rows = [{"step": step, "epoch": 1} for step in range(50)]
    scores = [] if scored is None else [{"step": scored}]
    found = lag(
        KeptRun(
            tmp_path, {"eval": {"every": every}}, [], MetricsFile(tmp_path), rows, ScoresFile(tmp_path), scores, None
        )
    )
    said = f"{behind} steps ago" if scored else "no version is scored in this folder"
    assert (found is None) if behind is None else said in found["text"]


def test_the_evaluator_of_a_fork_does_not_lag_at_its_first_step(tmp_path):
    """Before, the fork's version 0 was missed, though it began at 100."""
    rows, settings = [{"step": 100, "epoch": 1}], {"eval": {"every": 8}}
    assert lag(KeptRun(tmp_path, settings, [], MetricsFile(tmp_path), rows, ScoresFile(tmp_path), [], None)) is None
