"""A rollout worker in an image without what only studies, retrievers and evaluations need. No container runs here."""

from __future__ import annotations

import os
import re

import pytest

from tests.examples.test_containers import CONTAINERS
from tests.system.conftest import Run, finish
from tests.test_extras import MODULES, REFUSED

LEFT_OUT = """
import os, sys
if "workers.rollout" in sys.orig_argv:
    os.environ["IS_LEAN"] = "1"  # its engine's processes, too
if os.environ.get("IS_LEAN"):
    for name in {names!r}:
        sys.modules[name] = None  # an import of it raises ModuleNotFoundError
"""


@pytest.mark.slow
def test_a_worker_trains_a_step_without_what_its_image_leaves_out(run: Run, tmp_path, monkeypatch):
    lines = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    (packages,) = re.findall(r'LEAVE_OUT="([^"]+)"', lines)
    names = {MODULES.get(name, name) for name in packages.split()}
    assert names < {*REFUSED}, "each is of an extra"
    (tmp_path / "sitecustomize.py").write_text(LEFT_OUT.format(names=sorted(names)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run.forks = False
    started = [run.cusearch("redis"), run.worker("retriever"), run.worker("learner", run__steps=1)]
    rollout = run.worker("rollout", run__steps=1)
    status, output = finish(started[-1])
    assert status == 0, output
    status, output = finish(rollout)
    assert status == 0, output
    assert len(run.metrics()) == 1
