"""Makes the runs of a study with the stand-in of `fake_launch`: python -m tests.study.one_study FILE FOLDER"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import cache
from pathlib import Path

from cusearch_async.config import load_config
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.study import running
from cusearch_async.study.plan import Plan, read_plan
from cusearch_async.study.tables import Tables
from tests.study import fake_launch

FAKE = [sys.executable, "-m", "tests.study.fake_launch"]
START = running.start_child


def fake_child(command, **options):
    os.environ.setdefault(fake_launch.ASKED, asked())
    return START([*FAKE, *command], **options)


@cache
def asked() -> str:
    """The ids of the held-out questions, which a stand-in does not load."""
    config = load_config(Path("atlas"), ["--eval.questions_per_category", str(fake_launch.QUESTIONS // 5)])
    return json.dumps([question.id for question in load_eval_questions(config)])


def make(plan: Plan, folder: Path, told: list[tuple[str, str]]) -> Tables:
    folder.mkdir(exist_ok=True)
    runs = running.to_do(plan, Tables.read(folder), retry_failed=False)
    running.run_all(plan, folder, runs, lambda run, outcome, _: told.append((run.id, outcome)))
    return Tables.read(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
    running.start_child, running._LEAVE_S = fake_child, float(os.environ.get("LEAVE_S", "600"))
    make(read_plan(Path(sys.argv[1])), Path(sys.argv[2]), [])
