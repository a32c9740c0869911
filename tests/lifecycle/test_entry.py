"""What an entry point says: its help, its failures in one line, a bug with its traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.entry import exit_with_one_line
from tests.conftest import free_port


@pytest.mark.parametrize("module", ["workers.learner", "workers.rollout", "workers.retriever"])
@pytest.mark.system
def test_help_of_a_process_is_no_failure(module: str):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "a TOML file" in done.stdout


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("learner.lr: too high"), "test: learner.lr: too high"),
        (ExceptionGroup("tasks", [ValueError("x"), ConfigError("no")]), "test: no"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), "test: /nowhere: No such file or directory"),
        (
            ExceptionGroup("tasks", [PermissionError(13, "Permission denied", b"/root")]),
            "test: /root: Permission denied",
        ),
    ],
)
def test_a_failure_with_a_name_is_one_line(error: Exception, line: str):
    with pytest.raises(SystemExit) as ended, exit_with_one_line("test"):
        raise error
    assert str(ended.value.code).startswith(line)
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), OSError("no path"), ExceptionGroup("", [ValueError()])]
)
def test_a_bug_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error)), exit_with_one_line("test"):
        raise error


@pytest.mark.system
@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path):
    """Whatever the libraries say of their retries."""
    command = [
        sys.executable,
        "-m",
        "cusearch_async.cli.main",
        "launch",
        "atlas",
        "--model.path",
        "nobody/no-such-model",
    ]
    command += ["--run.folder", str(tmp_path / "run")]
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path / "hub")}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "model.path 'nobody/no-such-model' is no folder here, and as a Hub id it has no readable config.json" in line
    assert not (tmp_path / "run").exists()


def test_retries_of_the_hub_are_not_told_by_commands_that_have_imported_it():
    """`cusearch data` told each twice."""
    told = "from huggingface_hub.utils import logging; from cusearch_async.lifecycle.entry import log_to_stderr; "
    told += "log_to_stderr('x'); logging.get_logger('huggingface_hub.utils._http').warning('Retrying in 1s')"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stderr == ""


SAYS = """
import logging
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.entry import exit_with_one_line, log_to_stderr
log_to_stderr("worker")
foreign = "\\x1b]0;owned\\x07 down\\n12:00:00 learner: all is well"
with exit_with_one_line("worker"):
    logging.getLogger("any").warning("the retriever says: %s", foreign)
    try:
        raise ValueError(foreign)
    except ValueError:
        logging.getLogger("any").exception("a backend failed")
    raise ConfigError(f"the retriever says: {foreign}")
"""


def test_what_others_write_is_no_command_to_the_terminal_and_no_line_of_the_log():
    """A retriever's error could hide lines, and write some that looked like another process's."""
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=False)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    logged, *more, ended, _ = lines = done.stderr.splitlines()
    assert not any(line.startswith("12:00:00") for line in lines)
    assert "Traceback (most recent call last):" in more
    assert logged.endswith(r"worker: the retriever says: \u001b]0;owned\u0007 down\n12:00:00 learner: all is well")
    assert ended.startswith(r"worker: the retriever says: \u001b]0;owned")
