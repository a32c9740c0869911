"""We delete only what we made."""

import os

import pytest

from cusearch_async import run_folder
from cusearch_async.errors import ConfigError


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


def test_a_symbolic_link_is_unlinked_and_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "disk"
    run_folder.mark(folder, "mine")
    elsewhere.mkdir()
    (elsewhere / "model").write_text("weights")
    (folder / "weights").symlink_to(elsewhere)
    run_folder.forget(folder)
    assert (elsewhere / "model").exists()
    assert not folder.exists()


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
        with pytest.raises(ConfigError, match="home, root, repository or the current folder"):
            act(folder)
    assert (folder / "run.json").exists()


def test_a_folder_belongs_to_one_run(tmp_path):
    made = run_folder.mark(tmp_path / "run", "mine")
    assert run_folder.mark(tmp_path / "run", "mine") == made
    with pytest.raises(ConfigError, match="belongs to run 'mine', not to 'yours'"):
        run_folder.mark(tmp_path / "run", "yours")


def test_a_folder_with_strange_files_becomes_no_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(ConfigError, match=r"holds thesis\.txt, which no run has made"):
        run_folder.mark(tmp_path, "mine")


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
