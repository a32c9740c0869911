"""Whole runs: what a user sees when they start, watch, stop, break and resume one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from cusearch_async.atlas.questions import WORLDS
from cusearch_async.atlas.questions import test_chains as held_out_chains
from cusearch_async.transport.server import is_listening
from tests.conftest import SLOW, wait_until
from tests.system.conftest import Run, finish

pytestmark = pytest.mark.system

START_S = 150


def engines_of(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it helped with the start, and is gone since it was listed
            if "VLLM" in process.name():
                found.append(process)
    return found


@pytest.mark.long
def test_an_asynchronous_run_keeps_its_bound_and_its_ledger_and_resumes(run: Run):
    launched = run.cusearch("launch", run__steps=4)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, START_S)
    client = run.redis()
    buckets = [client.zcard(f"cusearch:{{atlas}}:depth:{depth}") for depth in range(6)]
    assert sum(buckets) <= 3 * 16
    some = next(client.scan_iter(match="cusearch:{atlas}:traj:*", count=1000))
    shown = client.hgetall(some)
    assert {"depth", "reward", "question", "answers", "ticket", "version", "worker", "state"} <= shown.keys()
    status, output = finish(launched)
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    assert all(sum(row["depth/generated"]) == 16 and sum(row["depth/selected"]) == 8 for row in rows)

    status, output = finish(run.cusearch("launch", "--accept-changes", run__steps=6, model__dtype="bfloat16"))
    assert status == 1
    assert "model.dtype is bfloat16 here and float32 in the run; use the" in output
    before = (run.folder / "config.toml").read_text()
    status, output = finish(run.cusearch("launch", run__steps=6, learner__lr=1e-4))
    assert status == 1
    assert "does not match run 'atlas': learner.lr is 0.0001 here and " in output
    assert "only its learner can change them, with --accept-changes" in output
    assert (run.folder / "config.toml").read_text() == before, "what was refused is no setting of the run"
    run.overrides["pool.max_attempts"] = 4  # which workers compare with the run's, so that the learner takes over first
    status, output = finish(run.cusearch("launch", "--accept-changes", run__steps=6, learner__lr=1e-4))
    assert status == 0, output
    assert "learner: since the last start: learner.lr" in output
    assert "learner: resuming from step 4" in output
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3, 4, 5]
    assert "loaded weights v000004-e" in run.log("rollout-0")
    assert "cusearch eval" in output
    assert "checkpoints/step000006" in output, "it ends with the model and what to do with it"
    assert (run.folder / "plot.png").exists()
    status, output = finish(run.cusearch("launch", run__steps=6), 60)
    assert status == 0
    assert "run atlas is complete: 6 steps are done" in " ".join(output.split())

    other = Run(run.folder.parent / "other", run.overrides | {"run.folder": run.folder.parent / "other"}, run.forks)
    other.started = run.started
    status, output = finish(run.on_folder("runs fork", str(other.folder), "--step", "4"))
    assert status == 0, output
    status, output = finish(other.cusearch("launch", run__name="other", run__steps=5, learner__lr=2e-4))
    assert status == 0, output
    assert "learner: resuming from step 4" in output
    assert [row["step"] for row in other.metrics()] == [4]
    assert other.metrics()[0]["train/lr"] == 2e-4
    assert "5 steps, 1 of them in" in output
    assert len(run.metrics()) == 6


def test_a_run_of_which_every_episode_fails_ends_with_their_error_and_recommends_no_model(run: Run):
    """Before: exit 0, "the ledger closes", the untouched start model recommended, and 320 equal lines in the log."""
    reward = "tests.environments.rewards:broken"
    status, output = finish(run.cusearch("launch", environment__search__reward=reward))
    assert status == 1
    assert f"a made-up episode failed: the reward {reward} failed: KeyError: 'JUDGE_URL'" in " ".join(output.split())
    assert not (run.folder / "logs").exists(), "nothing was started"
    reward += "_in_workers"
    status, output = finish(run.cusearch("launch", environment__search__reward=reward))
    said = " ".join(output.split())
    assert status == 1, output
    assert "step 0 has nothing to train on: all episodes of its 8 groups failed, 5 times each; most often: " in said
    assert f" x the reward {reward} failed: KeyError: 'JUDGE_URL'" in said
    assert "cusearch eval" not in output
    assert not list((run.folder / "checkpoints").glob("step*"))
    assert 0 < run.log("rollout-0").count(reward) < 20


@pytest.mark.long
def test_processes_start_in_any_order_and_stop_on_a_signal(run: Run):
    """Rollout worker and learner first, then Redis, then the retriever; SIGTERM and SIGINT end each cleanly. Their
    status says that their run has not ended: a Kubernetes job took one that was drained for complete."""
    run.forks = False
    rollout = run.worker("rollout")
    learner = run.worker("learner", run__steps=50)
    server = run.cusearch("redis")
    retriever = run.worker("retriever")
    wait_until(lambda: len(run.metrics()) >= 1 or rollout.poll() is not None or learner.poll() is not None, START_S)
    assert [p.poll() for p in (rollout, learner, retriever)] == [None] * 3
    learner.send_signal(signal.SIGINT)
    status, output = finish(learner, 60)
    assert status == 143, output
    assert "Traceback" not in output
    rollout.send_signal(signal.SIGTERM)
    status, output = finish(rollout, 60)
    assert status == 128 + signal.SIGTERM, output
    client = run.redis()
    ledger = {name: int(count) for name, count in client.hgetall("cusearch:{atlas}:ledger").items()}
    where = ("buffered", "claimed", "trained", "unselected", "expired")
    assert ledger["finished"] == sum(ledger.get(name, 0) for name in where)
    retriever.terminate()
    assert finish(retriever, 60)[0] == 0
    server.terminate()
    server.wait(20 * SLOW)


def test_launch_fails_loudly_when_a_worker_is_killed_and_leaves_nothing_behind(run: Run):
    launched = run.cusearch("launch", run__steps=50)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, START_S)
    worker = run.process("rollout")
    family = psutil.Process(launched.pid).children(recursive=True)
    assert engines_of(launched.pid)
    worker.kill()
    status, output = finish(launched, 60)
    assert status == 1
    assert "rollout-0 was killed by SIGKILL" in output
    assert "Traceback" not in output
    assert psutil.wait_procs(family, timeout=20 * SLOW)[1] == []


def is_ready(rollout) -> bool:
    return "ready" in rollout.log.read_text(errors="replace") or rollout.poll() is not None


@pytest.mark.slow
def test_an_engine_keeps_to_its_cores_and_does_not_outlive_its_worker(run: Run):
    """Neither while it starts nor later. The worker's own process takes any core: what plays the episodes takes a
    quarter of the engine's time, which another core may have to spare."""
    run.forks = False
    services = [run.cusearch("redis"), run.worker("retriever")]
    usable = psutil.Process().cpu_affinity()
    killed = run.worker("rollout")
    wait_until(lambda: engines_of(killed.pid) or killed.poll() is not None, START_S)
    assert not is_ready(killed)
    kill_with_engine(killed)
    rollout = run.worker("rollout", rollout__cores=usable[:1])
    wait_until(lambda: is_ready(rollout), START_S)
    assert [engine.cpu_affinity() for engine in engines_of(rollout.pid)] == [usable[:1]]
    assert psutil.Process(rollout.pid).cpu_affinity() == usable
    assert [service.poll() for service in services] == [None, None]
    kill_with_engine(rollout)


def kill_with_engine(rollout) -> None:
    """Kill the worker, whose engine must end by itself."""
    assert engines_of(rollout.pid)
    family = psutil.Process(rollout.pid).children(recursive=True)
    rollout.kill()
    assert psutil.wait_procs(family, timeout=20 * SLOW)[1] == []


def test_a_run_whose_launcher_was_killed_ends_by_itself(run: Run):
    launched = run.cusearch("launch", run__steps=50)
    wait_until(lambda: "ready" in run.log("rollout-0") or launched.poll() is not None, START_S)
    family = psutil.Process(launched.pid).children(recursive=True)
    launched.kill()
    assert psutil.wait_procs(family, timeout=40 * SLOW)[1] == []


def test_a_launch_that_is_stopped_ends_its_workers_first_and_redis_last(run: Run):
    """The learner ends its step, and says no word of a Redis that is gone; a second launch meanwhile is refused."""
    launched = run.cusearch("launch", run__steps=50, learner__checkpoint_every=50)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, START_S)
    status, output = finish(run.cusearch("launch", run__steps=50), 60)
    assert (status, "is in use: a launch, a demo or a warm start runs in it" in output) == (1, True), output
    family = psutil.Process(launched.pid).children(recursive=True)  # Redis and vLLM's engine name themselves otherwise
    os.kill(launched.pid, signal.SIGTERM)
    status, output = finish(launched, 120)
    assert status == 130, output
    done = run.metrics()[-1]["step"] + 1
    assert f"stopped at step {done}; checkpoint saved" in output
    assert (run.folder / "checkpoints" / f"step{done:06d}-e1" / "model" / "model.safetensors").exists()
    for name in ("learner", "rollout-0"):
        assert "cannot be reached" not in run.log(name)
        assert "Traceback" not in run.log(name)
    assert "killed" not in output
    assert run.processes() == []
    assert psutil.wait_procs(family, timeout=20 * SLOW)[1] == []


def test_a_launch_ends_when_its_learner_alone_is_stopped(run: Run):
    launched = run.cusearch("launch", run__steps=50, eval__every=50)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, START_S)
    family = psutil.Process(launched.pid).children(recursive=True)
    run.process("learner").terminate()
    status, output = finish(launched, 120)
    assert status == 1, output
    assert psutil.wait_procs(family, timeout=20 * SLOW)[1] == []
    assert (
        f"the learner stopped at step {run.metrics()[-1]['step'] + 1} of 50; start launch again to continue" in output
    )
    assert run.processes() == []


def test_only_when_told_to_a_launch_takes_over_a_run_that_is_alive(run: Run):
    services = [run.cusearch("redis"), run.worker("retriever")]
    wait_until(lambda: is_listening(run.overrides["redis.url"]), START_S)
    client = run.redis()
    learner = run.worker("learner", run__steps=1)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "weights") or learner.poll() is not None, START_S)
    seconds, micros = client.time()
    client.zadd("cusearch:{atlas}:workers", {"w1": seconds * 1000 + micros // 1000 + 60_000})
    status, output = finish(run.cusearch("launch", run__steps=1), 60)
    assert status == 1
    assert "is alive: w1" in output
    assert "add --take-over" in output
    status, output = finish(run.cusearch("launch", "--take-over", run__steps=1))
    assert status == 0, output
    status, output = finish(learner, 60)
    assert status == 1
    assert "another learner has taken over" in output
    assert [service.poll() for service in services] == [None, None]


@pytest.mark.slow
def test_ar3po_moves_rollouts_by_history_and_goes_on_after_a_restart(run: Run, tmp_path: Path):
    """Six questions of two links, so that each comes again and again; three have an answer that cannot be found."""
    questions = [chain.question() for chain in held_out_chains(6, WORLDS["atlas"])[6:12]]
    data = tmp_path / "questions.jsonl"
    with data.open("w") as file:
        for i, q in enumerate(questions):
            answers = list(q.answers) if i % 2 else ["no such answer"]
            file.write(json.dumps({"id": i, "question": q.text, "golden_answers": answers}) + "\n")
    ar3po = {"method__name": "ar3po", "data__source": data, "pool__questions": 6, "pool__max_staleness": 1}
    status, output = finish(run.cusearch("launch", run__steps=2, **ar3po))
    assert status == 1, output
    assert "our retriever would search the embedded world atlas, and no question is of it" in output
    retriever = run.worker("retriever")
    wait_until(lambda: "listening" in retriever.log.read_text() or retriever.poll() is not None, START_S)
    status, output = finish(run.cusearch("launch", run__steps=2, **ar3po))
    assert status == 0, output
    status, output = finish(run.cusearch("launch", run__steps=4, **ar3po))
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(4))
    assert all(sum(row["depth/generated"]) == sum(row["depth/selected"]) == 12 for row in rows), "always N G"
    checkpoint = json.loads((run.folder / "checkpoints" / "step000004-e2" / "state.json").read_text())["state"]
    visits = json.loads(checkpoint["method"]["memory"])["visits"]
    assert sorted(visits) == [f"questions/{i}" for i in range(6)]
    assert all(passed == 0 for i in (0, 2, 4) for passed, _ in visits[f"questions/{i}"])
    played = [played for history in visits.values() for _, played in history]
    assert {1, 2, 3, 4} >= set(played) > {2}, "groups of another size than G have been played"
    planned = {int(ticket): size for ticket, size in checkpoint["method"]["sizes"].items()}
    assert sorted(planned) == list(range(24, 36))
    assert sum(planned.values()) == 24


@pytest.mark.parametrize(
    ("process", "missing", "remedy"),
    [
        ("rollout", "Redis at 127.0.0.1", "cusearch redis"),
        ("learner", "Redis at 127.0.0.1", "cusearch redis"),
        ("rollout", "the retriever at http://127.0.0.1", "`cusearch worker retriever CONFIG`"),
    ],
)
def test_a_process_without_a_service_says_in_one_line_what_is_missing(run: Run, process, missing, remedy):
    if missing.startswith("the retriever"):
        run.cusearch("redis")
        wait_until(lambda: is_listening(run.overrides["redis.url"]), 30)
    status, output = finish(run.worker(process, run__wait_s=1), 60)
    last = output.strip().splitlines()[-1]
    assert status == 1
    assert missing in last
    assert remedy in last
    assert "Traceback" not in output


@pytest.mark.long
def test_what_methods_would_train_on_is_compared_with_the_reward_gradient(run: Run, tmp_path: Path):
    status, output = finish(run.cusearch("launch", run__steps=1))
    assert status == 0, output
    retriever = run.worker("retriever")
    written = tmp_path / "align.json"
    flags = ("--pools", "3", "--methods", "grpo_full,random", "--output", str(written))
    status, output = finish(run.on_folder("align", *flags))
    assert status == 0, output
    retriever.terminate()
    assert finish(retriever, 60)[0] == 0
    status, output = finish(run.on_folder("ask", "In which country is Pinsk?", "--gold", "Belarus"))
    assert status == 0, output
    assert "<search>" in output, "it has started a retriever for itself"
    assert re.search(r"→ .+ \(\d search(es)?, (right|wrong)\)", output)
    found = json.loads(written.read_text())
    assert found["policies"] == [0, 1]
    assert found["budget"] == 8
    whole, some = (found["methods"][name] for name in ("grpo_full", "random"))
    assert (whole["selected"], some["selected"]) == (16, 8)
    for rule in ("raw", "zero", "pool"):
        assert len(some["by_singleton"][rule]["values"]) == 2 * 3
        assert all(-1 <= value <= 1 for value in some["by_singleton"][rule]["values"])
        assert [len(one) for one in some["by_singleton"][rule]["without"]] == [3, 3]
    assert any(whole["by_singleton"]["raw"]["values"])
