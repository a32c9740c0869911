"""The Redis of a run: its data has one server at a time."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cusearch_async.cli import launch
from cusearch_async.cli import redis as redis_command
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.cli.parts.opening import refuse_redis_that_is_down
from cusearch_async.config import Config, load_config
from cusearch_async.errors import BufferUnavailable, RunInUse
from cusearch_async.lifecycle.children import start_child
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.transport.server import holding_data, is_listening, own_server, url_of_own
from tests.conftest import free_port, wait_until


@pytest.fixture
def config(atlas_config, tmp_path) -> Config:
    return on_port(atlas_config, tmp_path)


def on_port(atlas_config, tmp_path) -> Config:
    """The run of one folder, with its Redis on another port each time."""
    overrides = ["--run.folder", str(tmp_path / "run"), "--redis.url", f"redis://127.0.0.1:{free_port()}/0"]
    return load_config(atlas_config, overrides)


@contextmanager
def serving(config: Config) -> Iterator[None]:
    run_folder.mark(config.folder, config.run.name)
    with holding_data(config.redis, config.folder) as lock:
        command = own_server(config.redis, config.folder)
        server = start_child(command, log_file=config.folder / "redis" / "log", inherited=(lock,))
    try:
        wait_until(lambda: is_listening(config.redis.url), 20)
        yield
    finally:
        server.kill()
        server.wait()


def test_the_data_of_a_run_has_one_server_for_as_long_as_that_lives(config, atlas_config, tmp_path):
    assert url_of_own(config.redis, config.folder) is None
    second = on_port(atlas_config, tmp_path)
    with serving(config):
        assert url_of_own(second.redis, second.folder) == config.redis.url
        with pytest.raises(RunInUse, match=f"this run's Redis already listens at {config.redis.url}; set redis.url"):
            holding_data(second.redis, second.folder).__enter__()
        assert not is_listening(second.redis.url)
    assert url_of_own(config.redis, config.folder) is None
    with serving(second):
        assert url_of_own(config.redis, config.folder) == second.redis.url


@pytest.mark.parametrize("other", ["same", "another"])
def test_a_second_redis_command_names_the_first(config, atlas_config, cusearch, other):
    url = config.redis.url if other == "same" else f"redis://127.0.0.1:{free_port()}/0"
    with serving(config):
        said, _ = cusearch("redis", atlas_config, "--run.folder", config.folder, "--redis.url", url)
    if other == "same":
        assert said == f"cusearch: redis.url {url}: this run's own Redis listens there already; use that"
    else:
        assert f"this run's Redis already listens at {config.redis.url}; set redis.url to that, or stop it" in said


def test_a_launch_with_another_port_does_not_open_the_data_of_a_living_redis(config, atlas_config, tmp_path):
    second = on_port(atlas_config, tmp_path)
    with serving(config), Fleet(second) as fleet:
        with pytest.raises(RunInUse, match=f"this run's Redis already listens at {config.redis.url}"):
            fleet.start_services()
        assert not fleet.children


def test_a_redis_that_is_only_down_is_not_replaced_by_an_empty_one(config, atlas_config):
    settings = ["--run.folder", str(config.folder), "--redis.url", config.redis.url]
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)
    again = Namespace(config=[atlas_config], accept_changes=False, take_over=False)
    with pytest.raises(BufferUnavailable, match=rf"nothing listens at redis\.url {config.redis.url}, where this run's"):
        launch.run(again, settings)
    elsewhere = load_config(atlas_config, [*settings, "--redis.url", "redis://192.0.2.1:6379/0"])
    record_start(elsewhere, 2, 0)
    refuse_redis_that_is_down(elsewhere)  # none can be started there, which is told where it is tried
    record_start(config, 3, 0)
    (config.folder / "redis" / "appendonlydir").mkdir(parents=True)
    refuse_redis_that_is_down(config)  # launch's own, which it starts again
    (config.folder / "redis" / "appendonlydir").rmdir()
    refuse_redis_that_is_down(load_config(atlas_config, [*settings, "--redis.url", "redis://127.0.0.1:7/0"]))


def test_an_empty_redis_where_another_was_is_told_of(config, atlas_config, monkeypatch, caplog):
    """Its buffer, and the steps since the newest checkpoint, were gone without a word."""
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)
    monkeypatch.setattr(os, "execv", lambda *_: None)
    for url in (f"redis://127.0.0.1:{free_port()}/0", config.redis.url):
        assert "is empty" not in caplog.text
        settings = ["--run.folder", str(config.folder), "--redis.url", url]
        redis_command.run(Namespace(config=atlas_config, acl=False), settings)
    assert f"this run's Redis was at {config.redis.url} too, and its data is not in" in caplog.text


def test_a_redis_server_that_cannot_be_started_is_named(config, atlas_config, tmp_path, monkeypatch):
    """It was a traceback."""
    (tmp_path / "redis-server").write_text("no program")
    (tmp_path / "redis-server").chmod(0o755)
    command = [str(tmp_path / "redis-server")]
    monkeypatch.setattr(redis_command, "own_server", lambda *_: command)
    settings = ["--run.folder", str(config.folder), "--redis.url", config.redis.url]
    with pytest.raises(BufferUnavailable, match=r"redis-server cannot be started: Exec format error; install"):
        redis_command.run(Namespace(config=atlas_config, acl=False), settings)
