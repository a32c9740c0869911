"""Stands in for `cusearch launch`: leaves the folder of a run that is done, or does what FAKE_LAUNCH says.

fail    ends with a line and status 1
short   leaves a run without its last step
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


def main() -> None:
    from cusearch_async import run_folder
    from cusearch_async.config import load_config

    words = sys.argv[sys.argv.index("launch") + 1 :]
    config = load_config([Path(words[0])], words[1:])
    run_folder.mark(config.folder, config.run.name)
    with run_folder.hold(config.folder):
        leave(config, os.environ.get("FAKE_LAUNCH", ""))


def leave(config, how: str) -> None:
    from cusearch_async.data.questions import load_eval_questions
    from cusearch_async.files import append_row

    folder = config.folder
    began = folder / "began"
    began.open("a").write(f"{os.getpid()}\n")
    attempt = len(began.read_text().splitlines())
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"attempt {attempt}", flush=True)
    if how == "fail" and config.method.name == "sdga_phase":
        print("cusearch: the engine died\n")
        sys.exit(1)
    if how == "slow":
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(1.5) or sys.exit(1))
    while how in ("hang", "slow") and attempt == 1:
        time.sleep(0.05)
    (folder / "starts").mkdir(exist_ok=True)
    (folder / "starts" / "0001.toml").write_text(config.run.name)
    steps = config.run.steps - (how == "short")
    for step in range(steps):
        row = {"step": step, "epoch": 1, "reward/em": 0.25, "episode/sampled_tokens": 40.0, "time/step_s": 2.0}
        row |= {"depth/generated": [1, 2, 3], "depth/selected": [0, 1, 2], "train/tokens": 100.0}
        row |= {"depth/mean": 1.0, "depth/mean_trained": 1.5, "reward/all": 0.3}
        row |= {"groups/singleton_share": 0.0, "groups/zero_variance_share": 0.5}
        append_row(folder / "metrics.jsonl", row)
    count = len(load_eval_questions(config))
    for version in range(0, config.run.steps + 1, config.eval.every):
        em = [int(i < version * 3) for i in range(count)]
        scores = {
            "all": {"em": sum(em) / count, "depth": 1.0 + version},
            "each": {"em": em, "depth": [version] * count},
        }
        append_row(folder / "eval.jsonl", {"step": version, "epoch": 1, **scores})
    (folder / "summary").write_text(json.dumps({"redis": config.redis.url}))


if __name__ == "__main__":
    main()
