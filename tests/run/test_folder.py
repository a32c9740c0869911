"""We delete only what we made."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.files import write_file
from cusearch_async.run import folder as run_folder


def test_a_folder_with_a_config_toml_and_no_marker_is_left_alone(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "config.toml").write_text("title = 'my blog'")
    for act in (run_folder.forget, run_folder.move_aside):
        with pytest.raises(ConfigError, match=r"run\.json"):
            act(site)
    assert (site / "config.toml").read_text() == "title = 'my blog'"


def test_only_known_children_are_deleted(tmp_path):
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "thesis.txt").write_text("five years")
    run_folder.forget(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["thesis.txt"]


@pytest.mark.parametrize("name", ["config.toml", "weights", "logs", "thesis.txt"])
def test_a_folder_with_files_and_no_marker_becomes_no_run(tmp_path, name):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds {name} and no run.json, so it was not made by a run"):
        run_folder.mark(tmp_path / "site", "run")
    assert [path.name for path in (tmp_path / "site").iterdir()] == [name]


def test_a_folder_with_a_workers_copies_can_become_a_runs(tmp_path):
    """Where a worker or an evaluator of a learner elsewhere ran, a learner may continue. Before, it was refused."""
    for name in ("downloaded", "relayed", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / "eval.jsonl").write_text("{}\n")
    made = run_folder.mark(tmp_path, "run")
    assert run_folder.read_marker(tmp_path) == made
    (tmp_path / "eval.jsonl").unlink()
    (tmp_path / "run.json").unlink()
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds downloaded, relayed, tensorboard and no run\.json"):
        run_folder.mark(tmp_path, "run")


def test_processes_that_start_at_once_agree_on_one_marker(tmp_path):
    for attempt in range(20):
        folder = tmp_path / f"run-{attempt}"
        barrier = threading.Barrier(6)

        def start(folder=folder, barrier=barrier):
            barrier.wait()
            made = run_folder.mark(folder, "mine")
            (folder / "logs").mkdir(exist_ok=True)
            return made

        with ThreadPoolExecutor(6) as pool:
            ids = {future.result().id for future in [pool.submit(start) for _ in range(6)]}
        assert ids == {run_folder.read_marker(folder).id}


def test_what_an_interrupted_write_has_left_is_deleted_too(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    with monkeypatch.context() as killed:
        for act in ("replace", "unlink"):
            killed.setattr(Path, act, lambda *_, **__: None)
        for name in ("config.toml", "run.json"):
            write_file(folder / name, b"half")
    assert len(list(folder.glob(".unfinished-*"))) == 2
    (folder / ".notes").write_text("not ours")
    run_folder.forget(folder)
    assert [path.name for path in folder.iterdir()] == [".notes"]


def test_a_learner_cannot_start_while_its_folder_is_deleted(tmp_path, monkeypatch):
    """Its lock went before the weights: a learner that was started again made another."""
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    (folder / "weights").mkdir()
    refused = []

    def start(path):
        with pytest.raises(RunInUse, match="is being moved or deleted"), run_folder.hold_as_learner(folder):
            pass
        refused.append(path.name)
        path.rmdir()

    monkeypatch.setattr(run_folder.shutil, "rmtree", start)
    with run_folder.hold_without_learner(folder):
        run_folder.forget(folder)
    assert refused == ["weights"]
    assert not folder.exists()


@pytest.mark.parametrize("others", [[], ["notes.txt"]])
def test_a_learner_whose_folder_was_deleted_since_it_was_marked_does_not_start(tmp_path, others):
    """It trained, and its folder could then be neither resumed nor reset."""
    folder = tmp_path / "run"
    run_folder.mark(folder, "x")
    for name in others:
        (folder / name).touch()
    run_folder.forget(folder)
    with pytest.raises(RunInUse, match="is being moved or deleted"), run_folder.hold_as_learner(folder):
        pass


def test_a_learner_that_comes_last_of_all_is_refused_and_may_start_again(tmp_path, monkeypatch):
    """It locked a new file in a folder whose marker went next."""
    folder = tmp_path / "run"
    run_folder.mark(folder, "x")
    (folder / run_folder.TAKE_OVER).touch()
    unlink, refused = Path.unlink, []

    def come_first(path, **options):
        if path.name == run_folder.TAKE_OVER:
            with pytest.raises(RunInUse, match="is being moved or deleted"), run_folder.hold_as_learner(folder):
                pass
            refused.append(path)
        unlink(path, **options)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "unlink", come_first)
        run_folder.forget(folder)
    assert refused
    run_folder.mark(folder, "x")


def test_a_child_that_is_kept_keeps_the_marker(tmp_path):
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    for name in ("redis", "checkpoints"):
        (folder / name).mkdir()
    run_folder.forget(folder, keep=("redis",))
    assert sorted(path.name for path in folder.iterdir()) == ["redis", "run.json"]


def test_a_folder_in_use_is_neither_moved_nor_held_twice(tmp_path):
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    with run_folder.hold(folder):
        for act in (run_folder.move_aside, lambda held: run_folder.hold(held).__enter__()):
            with pytest.raises(RunInUse, match="is in use"):
                act(folder)
    assert run_folder.move_aside(folder) == tmp_path / "run-1"


def test_a_symbolic_link_is_unlinked_and_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "disk"
    run_folder.mark(folder, "mine")
    elsewhere.mkdir()
    (elsewhere / "model").write_text("weights")
    (folder / "weights").symlink_to(elsewhere)
    run_folder.forget(folder)
    assert (elsewhere / "model").exists()
    assert not folder.exists()


def test_a_warm_start_is_deleted_with_its_model(tmp_path):
    """Which stayed, and its folder was then refused as no run's."""
    run_folder.mark(tmp_path / "warm", "mine")
    (tmp_path / "warm" / run_folder.MODEL).mkdir()
    run_folder.forget(tmp_path / "warm")
    assert not (tmp_path / "warm").exists()


def test_a_run_behind_a_link_is_deleted_with_the_link(tmp_path):
    """On a larger disk, say: all of it went, and then came an error, before the weights in another folder."""
    run_folder.mark(tmp_path / "disk", "mine")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run_folder.forget(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize("kind", ["current", "home", "repository"])
def test_protected_folders_are_refused_even_with_a_marker(tmp_path, monkeypatch, kind):
    folder = tmp_path / "here"
    run_folder.mark(folder, "mine")
    if kind == "current":
        monkeypatch.chdir(folder)
    elif kind == "home":
        monkeypatch.setenv("HOME", str(folder))
    else:
        (folder / ".git").mkdir()
    for act in (run_folder.forget, run_folder.move_aside):
        with pytest.raises(ConfigError, match="home, root, repository or current folder"):
            act(folder)
    assert (folder / "run.json").exists()


def test_a_folder_belongs_to_one_run(tmp_path):
    made = run_folder.mark(tmp_path / "run", "mine")
    assert run_folder.mark(tmp_path / "run", "mine") == made
    with pytest.raises(ConfigError, match="belongs to run 'mine', not to 'yours'"):
        run_folder.mark(tmp_path / "run", "yours")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        run_folder.mark(tmp_path / "run", "mine")


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_folder.mark(tmp_path / "run", "mine")


def test_a_used_folder_is_moved_aside_under_the_next_free_number(tmp_path):
    folder = tmp_path / "demo"
    assert run_folder.move_aside(folder) is None
    for number in (1, 2):
        run_folder.mark(folder, "demo")
        assert run_folder.move_aside(folder) == tmp_path / f"demo-{number}"
    assert not folder.exists()


def test_learners_share_a_folder_which_nobody_moves_meanwhile(tmp_path):
    folder = tmp_path / "run"
    run_folder.mark(folder, "mine")
    with run_folder.hold_as_learner(folder):
        with run_folder.hold_as_learner(folder), run_folder.hold(folder):
            pass  # a newer learner takes over, in a new launch
        with pytest.raises(RunInUse, match="is in use: a learner runs in it"):
            run_folder.move_aside(folder)
    with run_folder.hold_without_learner(folder), pytest.raises(RunInUse, match="is being moved or deleted"):
        run_folder.hold_as_learner(folder).__enter__()
    assert run_folder.move_aside(folder) == tmp_path / "run-1"
    run_folder.forget(tmp_path / "run-1")
    assert list(tmp_path.iterdir()) == []
