"""The learner's heartbeat ends with the learner, and not before it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import SLOW

BROKEN = """
import sys, time
from pathlib import Path
from cusearch_async.lifecycle.entry import log_to_stderr
from cusearch_async.config import load_config
from cusearch_async.training.heartbeat import Heartbeat

class Ranks:
    def silent(self, seconds):
        raise TypeError("a rank has no name")

log_to_stderr("learner")
with Heartbeat(load_config(Path(sys.argv[1]), []), 1, Ranks()).beating():
    time.sleep(120)
"""


@pytest.mark.system
def test_an_error_in_the_heartbeat_ends_the_learner_with_it_as_the_last_line(atlas_config):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(atlas_config)],
        capture_output=True,
        text=True,
        timeout=100 * SLOW,
        check=False,
    )
    assert done.returncode == 1
    assert "learner: the heartbeat failed; the learner ends" in done.stderr
    assert done.stderr.splitlines()[-1] == "TypeError: a rank has no name"
