"""Loads a learner of one rank, makes an update and prints what they took and what `cusearch check` expects, in bytes.
Started by test_peak.py with overrides of configs/atlas.toml."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import load_config
from cusearch_async.lifecycle.placement import configure_process
from tests.system.learner_script import fixed_trajectories

CONFIG = Path(__file__).parents[2] / "configs" / "atlas.toml"
LOOK_EVERY_S = 0.001
FEW = 2
"""Trajectories of the update."""


def owned() -> int:
    """Bytes of pages of this process alone; those of mapped files can be dropped."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def main(overrides: list[str]) -> None:
    config = load_config(CONFIG, overrides)
    configure_process([])
    import torch

    from cusearch_async.learner.learner import DeepSpeedLearner
    from cusearch_async.learner.ranks import Ranks

    ranks = Ranks(600)
    torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()  # torch's own threads and tables are there before
    before, peaks, ended = owned(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_EVERY_S):
            peaks.append(max(peaks.pop(), owned()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    learner = DeepSpeedLearner(config, ranks)
    selected, advantages = fixed_trajectories()
    learner.update(selected[:FEW], advantages[:FEW], 0)
    ended.set()
    watcher.join()
    longest = max(len(trajectory.token_ids) for trajectory in selected[:FEW])
    tokens = max(longest, min(config.learner.micro_batch_tokens, longest * config.loss.minibatch))
    memory = sizing.learner_memory(shape_of(config.model), config, tokens)
    print(json.dumps({"taken": peaks[0] - before, "expected": memory.peak - sizing.DEVICE_ALLOWANCE}))


if __name__ == "__main__":
    main(sys.argv[1:])
