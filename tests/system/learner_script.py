"""One rank of a learner as a process of its own: python -m tests.system.learner_script FOLDER NAME.

Trains on fixed trajectories; writes FOLDER/weights-NAME.safetensors and the last step's FOLDER/report-NAME.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cusearch_async import host
from cusearch_async.config import load_config, split_overrides


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--to-step", type=int, default=2)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    own, overrides = split_overrides(sys.argv[1:])
    arguments = parser.parse_args(own)
    host.settle([])

    import numpy as np
    from safetensors.torch import save_file

    from cusearch_async.training.learner import Learner
    from cusearch_async.training.team import Team
    from tests.strategies import make_trajectory

    atlas = Path(__file__).parents[2] / "configs" / "atlas.toml"
    config = load_config(atlas, overrides)
    rng = np.random.default_rng(0)
    selected = []
    for ticket in range(10):
        sampled = int(rng.integers(5, 60))
        length = 8 + sampled + 2
        logprobs = rng.normal(-3, 0.3, sampled).astype(np.float32)
        token_ids = rng.integers(0, 370, length).astype(np.int32)
        selected.append(make_trajectory(ticket, prompt=8, sampled=sampled, token_ids=token_ids, logprobs=logprobs))
    advantages = rng.normal(size=len(selected))
    team = Team()
    learner = Learner(config, team)
    if arguments.load:
        learner.load(arguments.load)
    if not team.is_leader:
        learner.follow()
        return
    for step in range(arguments.from_step, arguments.to_step):
        report = learner.update(selected, advantages, step)
    if arguments.save:
        learner.save(arguments.save)
    save_file(learner.tensors(), arguments.folder / f"weights-{arguments.name}.safetensors")
    (arguments.folder / f"report-{arguments.name}.json").write_text(json.dumps(report))
    learner.stop()


if __name__ == "__main__":
    main()
