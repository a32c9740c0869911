"""What a process of a run says while it loads what it needs; small parts stand in for the large ones."""

from __future__ import annotations

import time

import pytest

from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import progress

pytestmark = pytest.mark.system


@pytest.fixture
def config(atlas_config, tmp_path, redis_url, monkeypatch, caplog) -> Config:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    overrides = ["--run.name", "test-processes", "--run.folder", str(tmp_path / "run"), "--redis.url", redis_url]
    overrides += ["--environment.search.name", "tests.environments.echo:Echo"]  # there is no retriever
    return load_config(atlas_config, overrides)


def load_slowly(*_: object) -> None:
    time.sleep(0.2)
    raise ConfigError("that was all")


def test_a_learner_says_that_it_loads_its_model(config, monkeypatch, caplog):
    from cusearch_async.processes import learner

    monkeypatch.setattr(learner, "DeepSpeedLearner", load_slowly)
    with pytest.raises(ConfigError, match="that was all"):
        learner.run(config)
    assert f"waiting for {config.model.location} to be loaded: 0 s" in caplog.messages


async def test_a_retriever_says_that_it_loads_its_index(config, monkeypatch, caplog):
    from cusearch_async.processes import retriever

    monkeypatch.setattr(retriever, "make_backend", load_slowly)
    with pytest.raises(ConfigError, match="that was all"):
        await retriever.run(config)
    assert "waiting for the corpus and its index to be loaded: 0 s" in caplog.messages
