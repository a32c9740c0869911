"""`cusearch reset` deletes what the run has made, after asking, and nothing else."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import redis

from cusearch_async.cli import reset
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.lifecycle.children import start_child
from cusearch_async.objects import Objects
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import NOBODY
from cusearch_async.training import checkpoint_objects
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerStatus
from cusearch_async.transport.server import holding_data, is_listening, server_command
from cusearch_async.weights import objects as weights_objects
from tests.conftest import free_port, wait_until


@pytest.fixture
def overrides(redis_url, tmp_path, request):
    return [
        "--run.name",
        f"reset-{abs(hash(request.node.name))}",
        "--run.folder",
        str(tmp_path / "run"),
        "--redis.url",
        redis_url,
    ]


@pytest.fixture
def config(atlas_config, overrides):
    """A run with keys in Redis, two own files, and one that is the user's."""
    config = load_config(atlas_config, overrides)
    run_folder.mark(config.folder, config.run.name)
    (config.folder / "metrics.jsonl").write_text("")
    (config.folder / "thesis.txt").write_text("five years")
    asyncio.run(fill(config))
    return config


async def fill(config, identity=NOBODY):
    async with open_buffer(config, identity=identity) as buffer:
        await buffer.recover(0)


LEARNER = {"epoch": 1, "host": "here", "pid": 17, "step": 3}


def keys_of(config) -> set[bytes]:
    client = redis.Redis.from_url(config.redis.url)
    return {key for key in client.scan_iter() if config.run.name.encode() in key}


def run_reset(atlas_config: Path, overrides: list[str], yes: bool = False) -> None:
    reset.run(Namespace(config=atlas_config, yes=yes), overrides)


def test_ctrl_d_is_no(config, atlas_config, overrides, monkeypatch):
    """It was a traceback."""

    def ends(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    run_reset(atlas_config, overrides)
    assert keys_of(config)
    assert (config.folder / "metrics.jsonl").exists()


def test_with_yes_keys_and_known_children_go_and_the_rest_stays(config, atlas_config, overrides):
    assert keys_of(config)
    run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config) == set()
    assert [path.name for path in config.folder.iterdir()] == ["thesis.txt"]


def test_checkpoints_in_an_object_store_go_too_and_another_runs_do_not(
    config, atlas_config, overrides, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    (tmp_path / "store").mkdir()
    objects = Objects(f"file://{tmp_path}/store", "of the test")
    monkeypatch.setattr(checkpoint_objects, "Objects", lambda url, key: objects)
    for path in ("run.json", "metrics.jsonl"):
        objects.put(path, config.folder / path)
    for path in ("starts/0001.json", "checkpoints/step000002-e1/state.json", "v000001-e1/manifest.json", "mine.txt"):
        objects.put(path, config.folder / "metrics.jsonl")
    overrides += ["--learner.checkpoint_objects", "s3://bucket/run"]
    run_reset(atlas_config, overrides, yes=True)
    assert sorted(objects.paths()) == ["mine.txt", "v000001-e1/manifest.json"]
    assert "4 files at s3://bucket/run" in caplog.text
    run_folder.mark(tmp_path / "other", "other")
    objects.put("run.json", tmp_path / "other" / "run.json")
    with pytest.raises(ConfigError, match="has the checkpoints of another run"):
        run_reset(atlas_config, [*overrides, "--run.folder", str(tmp_path / "third")], yes=True)
    assert "run.json" in objects.paths()


@pytest.mark.parametrize("key", ["state", "contract", "workers", "worker:w0"])
def test_a_run_whose_data_is_damaged_can_be_deleted(config, atlas_config, overrides, key, caplog):
    """Each command said that a reset helps, and the reset said so, too."""
    client, name = redis.Redis.from_url(config.redis.url), f"cusearch:{{{config.run.name}}}:{key}"
    client.delete(name)
    client.set(name, "x")
    if key == "worker:w0":
        client.zadd(f"cusearch:{{{config.run.name}}}:workers", {"w0": 1e15})
    run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config) == set()
    assert "whose run it is, and whether it is alive, cannot be read" in caplog.text


def test_a_store_of_a_later_run_of_the_same_name_is_left_alone(config, atlas_config, overrides, tmp_path, monkeypatch):
    """The command that deletes the run which Redis still holds, in its folder, had the config of the later one."""
    (tmp_path / "store").mkdir()
    objects = Objects(f"file://{tmp_path}/store", "of the test")
    monkeypatch.setattr(checkpoint_objects, "Objects", lambda url, key: objects)
    monkeypatch.setattr(weights_objects, "open_objects", lambda url: objects)
    run_folder.mark(tmp_path / "later", config.run.name)
    objects.put("run.json", tmp_path / "later" / "run.json")
    of_weights = ["--weights.transport", "object", "--weights.objects", "s3://bucket/run"]
    for store in (["--learner.checkpoint_objects", "s3://bucket/run"], of_weights):
        with pytest.raises(ConfigError, match=r"(has the checkpoints of|is for) another run"):
            run_reset(atlas_config, [*overrides, *store], yes=True)
        assert objects.paths() == ["run.json"]


def test_versions_in_an_object_store_go_too_and_another_runs_do_not(
    config, atlas_config, overrides, tmp_path, monkeypatch
):
    (tmp_path / "store").mkdir()
    objects = Objects(f"file://{tmp_path}/store", "of the test")
    monkeypatch.setattr(weights_objects, "open_objects", lambda url: objects)
    overrides += ["--weights.transport", "object", "--weights.objects", "s3://bucket/run"]
    run_folder.mark(tmp_path / "other", "other")
    objects.put("v000001-e1/manifest.json", config.folder / "metrics.jsonl")
    objects.put("run.json", tmp_path / "other" / "run.json")
    with pytest.raises(ConfigError, match=r"file://.* is for run 'other', not for"):
        run_reset(atlas_config, overrides, yes=True)
    assert len(objects.paths()) == 2
    objects.put("run.json", config.folder / "run.json")
    run_reset(atlas_config, overrides, yes=True)
    assert objects.paths() == []


def test_weights_in_a_separate_folder_are_deleted_too_and_a_strange_folder_does_not(
    config, atlas_config, overrides, tmp_path
):
    weights, strange = tmp_path / "shm", tmp_path / "strange"
    run_folder.mark(weights, config.run.name)
    (weights / "weights" / "v000001-e1").mkdir(parents=True)
    (strange / "weights").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"strange holds no run\.json"):
        run_reset(atlas_config, [*overrides, "--weights.folder", str(strange)], yes=True)
    assert keys_of(config)
    run_reset(atlas_config, [*overrides, "--weights.folder", str(weights)], yes=True)
    assert not weights.exists()
    assert (strange / "weights").exists()


def test_without_yes_and_without_a_terminal_it_says_what_it_would_delete(config, atlas_config, overrides):
    here, command = config.folder, ["-m", "cusearch_async.cli.main", "reset", str(atlas_config), *overrides]
    done = subprocess.run(
        [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    count = len(keys_of(config))
    assert f"delete run {config.run.name}: {count} keys at {config.redis.url}, 3 files in {here}?" in done.stderr
    assert "add --yes" in done.stderr
    assert count > 0
    assert (here / "metrics.jsonl").exists()


@pytest.mark.parametrize(("answer", "is_deleted"), [("", False), ("n", False), ("y", True)])
def test_on_a_terminal_it_asks(config, atlas_config, overrides, answer, is_deleted, monkeypatch):
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    run_reset(atlas_config, overrides)
    (question,) = asked
    assert question.endswith("? [y/N] ")
    assert (keys_of(config) == set()) is is_deleted
    assert (config.folder / "metrics.jsonl").exists() is not is_deleted


@pytest.mark.parametrize("who", ["worker", "learner"])
def test_a_run_with_a_live_process_is_not_deleted(config, atlas_config, overrides, who):
    client = redis.Redis.from_url(config.redis.url)

    async def beat():
        async with open_buffer(config) as buffer:
            await buffer.heartbeat("w1", [], WorkerStatus(version=0))

    if who == "worker":
        asyncio.run(beat())
    else:
        client.hset(f"cusearch:{{{config.run.name}}}:learner", mapping=LEARNER)
        client.expire(f"cusearch:{{{config.run.name}}}:learner", 60)
    named = "w1" if who == "worker" else r"the learner \(process 17 on here\)"
    with pytest.raises(RunInUse, match=f"is alive: {named}; stop it first"):
        run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config)
    assert (config.folder / "metrics.jsonl").exists()


def test_a_folder_in_use_is_not_deleted(config, atlas_config, overrides):
    with run_folder.hold(config.folder), pytest.raises(RunInUse, match="is in use"):
        run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config)


def test_the_folder_of_another_run_is_not_deleted(config, atlas_config, overrides):
    with pytest.raises(ConfigError, match=f"belongs to run '{config.run.name}', not to 'another'"):
        run_reset(atlas_config, [*overrides, "--run.name", "another"], yes=True)
    assert (config.folder / "metrics.jsonl").exists()


def test_the_current_folder_is_never_deleted(atlas_config, overrides, tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("title = 'my blog'")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="current folder; nothing in it was deleted"):
        run_reset(atlas_config, [*overrides, "--run.folder", "."], yes=True)
    assert (tmp_path / "config.toml").exists()


def test_keys_without_a_folder_may_be_anothers_and_it_says_so(config, atlas_config, overrides, tmp_path):
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=rf"keys at .* \(but there is no folder {nowhere}: is this your run\?\)"):
        run_reset(atlas_config, [*overrides, "--run.folder", str(nowhere)])
    assert keys_of(config)


def test_a_run_that_never_was_is_nothing_to_delete(atlas_config, overrides, caplog):
    caplog.set_level("INFO")
    run_reset(atlas_config, overrides)
    assert "nothing to delete" in caplog.text


def test_a_redis_of_the_runs_own_goes_with_the_folder_unless_it_is_running(atlas_config, overrides, tmp_path):
    url = f"redis://127.0.0.1:{free_port()}/0"
    overrides = [*overrides, "--redis.url", url]
    config = load_config(atlas_config, overrides)
    run_folder.mark(config.folder, config.run.name)
    (config.folder / "metrics.jsonl").write_text("")
    server = start_child(server_command(url, config.folder / "redis", None), log_file=tmp_path / "log")
    try:
        wait_until(lambda: is_listening(url), 20)
        asyncio.run(fill(config))
        run_reset(atlas_config, overrides, yes=True)
        assert keys_of(config) == set()
        assert sorted(path.name for path in config.folder.iterdir()) == ["redis", "run.json"]
        asyncio.run(fill(config))
        assert keys_of(config), "the server lives on, on its own files"
    finally:
        server.terminate()
        server.wait()
    run_reset(atlas_config, overrides, yes=True)
    assert not config.folder.exists()


def test_the_data_of_a_redis_that_listens_elsewhere_is_not_deleted_under_it(atlas_config, overrides):
    here, elsewhere = ([*overrides, "--redis.url", f"redis://127.0.0.1:{free_port()}/0"] for _ in range(2))
    config = load_config(atlas_config, elsewhere)
    run_folder.mark(config.folder, config.run.name)
    with holding_data(config.redis, config.folder), pytest.raises(RunInUse, match=re.escape(config.redis.url)):
        run_reset(atlas_config, here, yes=True)
    assert (config.folder / "redis" / "lock").exists()
    run_reset(atlas_config, here, yes=True)
    assert not config.folder.exists()


async def test_a_learner_is_not_told_to_reset_before_it_asks_whose_run_it_is(atlas_config, overrides):
    """Redis holds another run of the same name, further than this folder's checkpoints."""
    config = load_config(atlas_config, overrides)
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.ask(lambda client: client.hset(buffer.keys.state, mapping={"step": 4, "checkpoint": 4}))
        with pytest.raises(ConfigError, match=r"if another run has this name, choose another run\.name; otherwise"):
            await buffer.recover(0)


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_keys_of_another_run_of_this_name_are_not_deleted(config, atlas_config, overrides, tmp_path, has_folder):
    asyncio.run(fill(config, NOBODY.in_folder(config.folder)))
    other = tmp_path / "other"
    if has_folder:
        run_folder.mark(other, config.run.name)
    theirs = [*overrides, "--run.folder", str(other)]
    with pytest.raises(ConfigError, match=f" {other} on .* here and {config.folder} on .*; `cusearch reset "):
        run_reset(atlas_config, theirs, yes=True)
    assert keys_of(config)
    assert other.exists() is has_folder
    run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config) == set()


def test_a_run_whose_folder_was_deleted_by_hand_can_be_reset(config, atlas_config, overrides):
    asyncio.run(fill(config, NOBODY.in_folder(config.folder)))
    shutil.rmtree(config.folder)
    run_folder.mark(config.folder, config.run.name)
    run_reset(atlas_config, overrides, yes=True)
    assert keys_of(config) == set()


def test_the_folder_of_a_living_learner_is_not_deleted_though_its_redis_is_down(atlas_config, overrides):
    overrides = [*overrides, "--redis.url", f"redis://127.0.0.1:{free_port()}/0"]
    config = load_config(atlas_config, overrides)
    run_folder.mark(config.folder, config.run.name)
    for child in ("redis", "checkpoints"):
        (config.folder / child).mkdir()
    with (
        run_folder.hold_as_learner(config.folder),
        pytest.raises(RunInUse, match="is in use: a learner runs in it; stop that first"),
    ):
        run_reset(atlas_config, overrides, yes=True)
    assert (config.folder / "checkpoints").exists()
    run_reset(atlas_config, overrides, yes=True)
    assert not config.folder.exists()


def test_weights_in_an_object_store_go_too(config, atlas_config, overrides, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    (tmp_path / "store").mkdir()
    objects = Objects(f"file://{tmp_path}/store", "of the test")
    monkeypatch.setattr("cusearch_async.weights.objects.open_objects", lambda url: objects)
    for path in ("v000001-e1/manifest.json", "v000001-e1/model.safetensors", "v000002-e1/manifest.json", "mine.txt"):
        objects.put(path, config.folder / "metrics.jsonl")
    overrides += ["--weights.transport", "object", "--weights.objects", "s3://bucket/run"]
    run_reset(atlas_config, overrides, yes=True)
    assert objects.paths() == ["mine.txt"]
    assert "3 files at s3://bucket/run" in caplog.text
