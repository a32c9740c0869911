"""Stands in for `cusearch launch`: leaves the folder of a run that is done, or does what FAKE_LAUNCH says.

fail    ends with a line and status 1
refuse  ends with the two lines of a config with two errors, and status 1
short   leaves a run without its last step
hole    leaves a run without one of its scores
hang    says that it began, and waits
slow    the same, and takes its time to stop
die     is killed before it says a word
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from cusearch_async.files import append_row
from cusearch_async.run import folder as run_folder

ASKED = "FAKE_QUESTIONS"
"""Environment variable with the ids of the held-out questions."""
QUESTIONS = 40
"""Held-out questions of the studies in `studies.py`: five categories of eight."""


def main() -> None:
    """Only what is light is imported: a study's tests start many of these."""
    words = sys.argv[sys.argv.index("launch") + 1 :]
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    folder = Path(settings["--run.folder"])
    run_folder.mark(folder, settings["--run.name"])
    with run_folder.hold(folder):
        leave(words, settings, folder, os.environ.get("FAKE_LAUNCH", ""))


def leave(words: list[str], settings: dict[str, str], folder: Path, how: str) -> None:
    began = folder / "began"
    began.open("a").write(f"{os.getpid()}\n")
    attempt = len(began.read_text().splitlines())
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "slow":
        signal.signal(signal.SIGTERM, lambda *_: print("told to stop", flush=True) or time.sleep(1.5) or sys.exit(1))
    print(f"attempt {attempt}", flush=True)
    if how == "fail" and settings["--method.name"] == "sdga_phase":
        print("cusearch: the engine died\n")
        sys.exit(1)
    if how == "refuse":
        sys.exit("cusearch: a.b: unknown key\n  c.d: unknown key")
    while how in ("hang", "slow") and attempt == 1:
        time.sleep(0.05)
    steps, every = int(settings["--run.steps"]), int(settings["--eval.every"])
    if (folder / "eval.jsonl").exists() and f'"step":{steps}' in (folder / "eval.jsonl").read_text().replace(" ", ""):
        return  # it is complete
    (folder / "starts").mkdir(exist_ok=True)
    (folder / "starts" / "words.json").write_text(json.dumps(words))
    for step in range(steps - (how == "short")):
        row = {"step": step, "epoch": 1, "reward/em": 0.25, "episode/sampled_tokens": 40.0, "time/step_s": 2.0}
        row |= {"depth/generated": [1, 2, 3], "depth/selected": [0, 1, 2], "train/tokens": 100.0}
        row |= {"depth/mean": 1.0, "depth/mean_trained": 1.5, "reward/all": 0.3}
        row |= {"groups/singleton_share": 0.0, "groups/zero_variance_share": 0.5}
        append_row(folder / "metrics.jsonl", row)
    for version in range(0, steps + 1, every):
        if how == "hole" and version == every:
            continue
        em = [int(i < version * 3) for i in range(QUESTIONS)]
        scores = {
            "all": {"em": sum(em) / QUESTIONS, "depth": 1.0 + version},
            "each": {"em": em, "depth": [version] * QUESTIONS, "question_id": json.loads(os.environ[ASKED])},
        }
        append_row(folder / "eval.jsonl", {"step": version, "epoch": 1, **scores})


if __name__ == "__main__":
    main()
