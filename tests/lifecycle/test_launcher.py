"""The learner's ranks and nodes as a launcher started them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from cusearch_async.cli import main
from cusearch_async.config import LearnerConfig
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.launcher import launched_ranks


@pytest.mark.parametrize(
    ("given", "env", "overrides"),
    [
        ({}, {}, []),
        ({"ranks": 4}, {}, []),
        ({}, {"WORLD_SIZE": "1"}, ["--learner.ranks=1", "--learner.nodes=1"]),
        ({}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, ["--learner.ranks=16", "--learner.nodes=2"]),
        ({}, {"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, ["--learner.ranks=16", "--learner.nodes=2"]),
        ({"ranks": 16, "nodes": 2}, {"WORLD_SIZE": "16"}, ["--learner.ranks=16", "--learner.nodes=2"]),
        ({"ranks": 16}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, ["--learner.ranks=16", "--learner.nodes=2"]),
    ],
)
def test_the_launcher_says_how_many_ranks_there_are(given, env, overrides):
    assert launched_ranks(LearnerConfig(**given), env) == overrides


@pytest.mark.parametrize("command", ["warmstart", "worker"])
def test_both_commands_that_train_take_the_launchers_ranks(command, monkeypatch, tmp_path):
    """`warmstart` did not: under torchrun its 16 ranks all took the last GPU of their node."""
    found = []

    @contextmanager
    def rank_of_learner(config, *_, **__):
        found.append(config.learner)
        raise ConfigError("seen")
        yield

    words = {
        "warmstart": ["warmstart", "atlas", "--demonstrations", str(tmp_path / "some.jsonl")],
        "worker": ["worker", "learner", "atlas"],
    }
    monkeypatch.setattr("cusearch_async.cli.warmstart.rank_of_learner", rank_of_learner)
    monkeypatch.setattr("cusearch_async.processes.start.rank_of_learner", rank_of_learner)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["cusearch", *words[command]])
    with pytest.raises(SystemExit):
        main.main()
    (learner,) = found
    assert (learner.ranks, learner.nodes) == (4, 2)


@pytest.mark.parametrize(
    ("given", "env", "said"),
    [
        ({"ranks": 3}, {"WORLD_SIZE": "2"}, "learner.ranks = 3, but WORLD_SIZE is 2; set both to the same number"),
        ({"ranks": 1}, {"WORLD_SIZE": "2"}, "learner.ranks = 1, but WORLD_SIZE is 2"),
        (
            {"ranks": 4, "nodes": 1},
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "learner.nodes = 1, but WORLD_SIZE / LOCAL_WORLD_SIZE is 2",
        ),
        ({"ranks": 4, "nodes": 2}, {}, "learner.nodes = 2, but WORLD_SIZE is not set: start the learner on each"),
        ({}, {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3"}, "this node has 3 of the learner's 5 ranks; start equally"),
        ({"nodes": 2}, {"WORLD_SIZE": "1"}, "this run has 1 ranks for learner.nodes = 2"),
        ({}, {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
        ({}, {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment"),
        ({}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is '' in the environment"),
    ],
)
def test_what_does_not_fit_the_launcher_is_refused_in_one_line(given, env, said):
    with pytest.raises(ConfigError) as refused:
        launched_ranks(LearnerConfig(**given), env)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
