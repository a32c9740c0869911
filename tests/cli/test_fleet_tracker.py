"""`launch` starts the process that sends a run's figures to its trackers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from tests.cli.test_fleet import config

__all__ = ["config"]


def test_a_run_with_trackers_has_a_process_that_sends_to_them(config, monkeypatch):
    commands = {}
    monkeypatch.setattr(Fleet, "_start", lambda self, name, command, env=None: commands.update({name: command}))
    Fleet(config).start_run()
    assert "tracker" not in commands
    Fleet(config.model_copy(update={"run": config.run.model_copy(update={"trackers": ("wandb",)})})).start_run()
    assert commands["tracker"][2:] == [
        "cusearch_async.cli.main", "runs", "track", str(config.folder), "--follow", "--trust"
    ]  # fmt: skip


def test_the_tracker_of_a_run_that_is_continued_reads_its_new_config(config, monkeypatch):
    """Started at once it read the last start's: without its trackers, and with its last step."""
    run_folder.mark(config.folder, config.run.name)
    record_start(config, epoch=1, step=0)
    continued = config.model_copy(update={"run": config.run.model_copy(update={"trackers": ("wandb",), "steps": 900})})
    read = {}

    def wait(fleet, is_done, poll_s=0.0):
        assert {"learner", "rollout-0"} <= fleet.children.keys(), "workers do not wait"
        record_start(continued, epoch=2, step=10)
        assert is_done()

    def start(fleet, name, command, env=None):
        of_this_test = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        fleet.children[name] = SimpleNamespace(process=of_this_test)
        if name == "tracker":
            read.update(KeptRun.read(Path(command[5])).settings["run"])

    monkeypatch.setattr(Fleet, "_start", start)
    monkeypatch.setattr(Fleet, "wait", wait)
    Fleet(continued).start_run()
    assert (read["trackers"], read["steps"]) == (["wandb"], 900)


def test_a_tracker_that_ends_while_the_others_are_looked_at_does_not_end_the_run(config, caplog):
    statuses = iter([None, 1, 1])
    process = SimpleNamespace(poll=lambda: next(statuses))
    fleet = Fleet(config)
    fleet.children["tracker"] = SimpleNamespace(process=process, describe_end=lambda: "tracker ended with status 1")
    fleet.check()
    fleet.check()
    assert "the run continues without its tracker: tracker ended with status 1" in caplog.text
