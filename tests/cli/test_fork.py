"""`cusearch runs fork`: another run from a checkpoint, with nothing in common that is for one run."""

from __future__ import annotations

import re
from argparse import Namespace

import pytest

from cusearch_async.cli.parts import fork
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.run import folder as run_folder
from cusearch_async.training.checkpoint import Checkpoints, state_at
from cusearch_async.transport.interface import MethodState
from tests.cli.test_runs import cusearch, make_run

__all__ = ["make_run"]


@pytest.fixture
def checkpointed(make_run):
    """A run with checkpoints of steps 2 and 4."""
    config = make_run("one")
    checkpoints = Checkpoints(config.folder, 2)
    checkpoints.begin(1, 0)
    for step in (2, 4):
        folder = checkpoints.begin_write(step)
        with checkpoints.write(state_at(step, MethodState(), config)):
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_text(str(step))
        checkpoints.finish(step)
    return config


def test_a_run_that_has_no_checkpoint_yet_says_so(make_run, tmp_path):
    """It had none of step 0, which nobody had asked for."""
    with pytest.raises(ConfigError, match=r"one has no checkpoint yet$"):
        fork.fork(Namespace(folder=make_run("one").folder, new=tmp_path / "new", step=None), [])


def test_a_fork_that_was_not_launched_is_not_forked(checkpointed, tmp_path):
    """Its command named a config.toml that is not there, and the folders of the first run."""
    fork.fork(Namespace(folder=checkpointed.folder, new=tmp_path / "new", step=None), [])
    with pytest.raises(ConfigError, match=r"new has no config: .* fork the run that it is of instead"):
        fork.fork(Namespace(folder=tmp_path / "new", new=tmp_path / "newer", step=None), [])
    assert not (tmp_path / "newer").exists()


def test_the_config_of_a_launch_that_ended_early_is_named(checkpointed, tmp_path, caplog):
    caplog.set_level("INFO")
    (checkpointed.folder / "config.toml").rename(checkpointed.folder / "launch.toml")
    fork.fork(Namespace(folder=checkpointed.folder, new=tmp_path / "new", step=None), [])
    assert f"cusearch launch {checkpointed.folder}/launch.toml " in caplog.messages[-1]


@pytest.mark.parametrize(("words", "step"), [((), 4), (("--step", "2"), 2)])
def test_a_fork_has_the_checkpoint_alone_and_is_another_run(checkpointed, tmp_path, capsys, words, step):
    cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / "new"), *words)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"run.json", "checkpoints"}
    assert run_folder.read_marker(tmp_path / "new").run == "new"
    assert run_folder.read_marker(tmp_path / "new").id != run_folder.read_marker(checkpointed.folder).id
    found = Checkpoints(tmp_path / "new", 1).latest()
    assert (found.state.step, found.damaged()) == (step, [])


def test_of_a_finished_run_a_fork_asks_how_many_steps_to_add(checkpointed, make_run, tmp_path, capsys, caplog):
    """The command that was printed ended at once, and the advice was to give run.steps a second time."""
    caplog.set_level("INFO")
    make_run("one", "--run.steps", "4", steps=0)
    cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / "new"))
    assert "begins at step 4, the last; add --steps N" in caplog.text
    assert "--run.steps" not in caplog.messages[-1]
    cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / "newer"), "--step", "2")
    assert "--run.steps 4" in caplog.messages[-1]


def test_a_fork_has_a_place_of_the_same_kind_for_everything_that_is_for_one_run(
    checkpointed, make_run, tmp_path, capsys, caplog
):
    caplog.set_level("INFO")
    settings = "--weights.transport object --weights.objects s3://b/w --learner.checkpoint_objects s3://b/c"
    make_run("one", *settings.split(), "--weights.folder", str(tmp_path / "shm"), steps=0)
    cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / "new"))
    command = caplog.messages[-1].split()
    begun = load_config(checkpointed.folder / "config.toml", command[command.index("--run.name") :])
    assert begun.weights_folder.is_relative_to(tmp_path / "new")
    assert (begun.weights.objects, begun.learner.checkpoint_objects) == ("s3://b/w/new", "s3://b/c/new")


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]"])
def test_a_fork_of_a_run_that_serves_its_weights_has_another_port(
    checkpointed, make_run, tmp_path, capsys, caplog, host
):
    """Its learner waited for that of the run, and its workers asked the other run."""
    caplog.set_level("INFO")
    make_run("one", "--weights.transport", "http", "--weights.url", f"http://{host}:29400", steps=0)
    cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / "new"))
    (port,) = re.findall(rf"--weights\.url '?http://{re.escape(host)}:(\d+)", caplog.messages[-1])
    assert port != "29400"


def test_a_run_that_has_begun_is_no_place_for_a_fork(checkpointed, make_run, tmp_path, capsys):
    """Its rows and the other's were one run, and it continued with the other's weights."""
    begun = make_run("two", "--run.name", "two")
    with pytest.raises(ConfigError, match="two has begun already"):
        cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(begun.folder))
    assert not (begun.folder / "checkpoints").exists()


def test_a_fork_has_a_redis_of_its_own_beside_that_of_the_run(checkpointed, tmp_path, capsys, caplog, monkeypatch):
    """Which knows no other run's password."""
    caplog.set_level("INFO")
    (checkpointed.folder / "redis").mkdir()
    for is_up in (False, True):
        monkeypatch.setattr(fork, "is_listening", lambda _, is_up=is_up: is_up)
        cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(tmp_path / f"new-{is_up}"))
        assert ("--redis.url redis://127.0.0.1:" in caplog.messages[-1]) == is_up


@pytest.mark.parametrize(
    ("to", "words", "why"),
    [
        ("new", ("--step", "3"), "has no checkpoint of step 3; it has 2, 4"),
        ("a b", (), "'a b' cannot be one"),
        ("one", (), "belongs to run 'atlas', not to 'one'; choose another"),
        ("new", ("--step", "2"), "is damaged (model/weights); take another --step"),
    ],
)
def test_what_cannot_be_forked_is_said_and_leaves_nothing(checkpointed, tmp_path, capsys, to, words, why):
    if why.startswith("is damaged"):
        (checkpointed.folder / "checkpoints" / "step000002-e1" / "model" / "weights").write_text("3")
    place = checkpointed.folder if to == "one" else tmp_path / to
    with pytest.raises(ConfigError, match=re.escape(why)):
        cusearch(capsys, "runs", "fork", str(checkpointed.folder), str(place), *words)
    assert not (tmp_path / to).exists()


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_named(checkpointed, tmp_path, monkeypatch):
    """By the learner of a live run; the error named the new folder, which is fine, as one that cannot be written."""

    def removing(source, target):
        (source / "state.json").unlink()
        raise FileNotFoundError(2, "No such file or directory", str(source / "state.json"))

    monkeypatch.setattr(fork.shutil, "copytree", removing)
    given = Namespace(folder=checkpointed.folder, new=tmp_path / "new", step=None)
    with pytest.raises(ConfigError, match=r"one/checkpoints/step000004-e1 was removed meanwhile .*; fork again"):
        fork.fork(given, [])
    monkeypatch.undo()
    fork.fork(given, [])
    assert Checkpoints(tmp_path / "new", 1).latest().state.step == 2
