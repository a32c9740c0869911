"""The ranks of a learner start together, and end together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cusearch_async
from tests.conftest import SLOW

pytestmark = pytest.mark.system

ROOT = Path(cusearch_async.__file__).parents[1]


PROBE = """
import os, sys
from pathlib import Path
from cusearch_async.lifecycle.children import other_ranks

if __name__ == "__main__":
    with other_ranks("rank_probe", 3) as rank:
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        Path(sys.argv[1], str(rank)).write_text(" ".join(os.environ[name] for name in names))
"""


def test_the_ranks_of_a_learner_meet_on_loopback(tmp_path: Path):
    (tmp_path / "rank_probe.py").write_text(PROBE)
    command = [sys.executable, "-m", "rank_probe", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=True, timeout=60 * SLOW)
    (said,) = {(tmp_path / str(rank)).read_text() for rank in range(3)}
    assert said.startswith("3 127.0.0.1 ")


LEAVES = """
import logging, sys, time
from cusearch_async.lifecycle import children

if __name__ == "__main__":
    children.LEAVE_S = 1.0
    logging.basicConfig()
    with children.other_ranks("rank_probe", 3) as rank:
        time.sleep(600 if rank == 1 else rank / 4)
    if rank == 2:
        sys.exit(3)
    time.sleep(0.5)  # long enough for who would end rank 0 because others were killed
    print(rank, "has left")
"""


def test_a_rank_that_is_slow_to_leave_does_not_spoil_a_learner_that_has_done_its_work(tmp_path: Path):
    (tmp_path / "rank_probe.py").write_text(LEAVES)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "rank_probe"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120 * SLOW, check=False)
    assert (done.returncode, done.stdout) == (0, "0 has left\n"), done.stderr
    assert "rank 1 did not end within 1 s; killed" in done.stderr
    assert "Traceback" not in done.stderr


FAILS = """
import sys, time
from pathlib import Path
from cusearch_async.lifecycle.children import other_ranks

if __name__ == "__main__":
    with other_ranks("rank_probe", 2) as rank:
        if rank == 1:
            sys.exit(3)
        try:
            time.sleep(1)
            raise RuntimeError("the collective failed")
        finally:
            time.sleep(0.3)
            Path(sys.argv[1], "told").touch()
"""


def test_a_learner_whose_other_rank_has_failed_may_tell_of_it(tmp_path: Path):
    """It was ended at once: no hook heard of it, and the run was "running or killed"."""
    (tmp_path / "rank_probe.py").write_text(FAILS)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "rank_probe", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert done.returncode == 1
    assert "the collective failed" in done.stderr
    assert (tmp_path / "told").exists()
