"""Records what a run trains on, for `make bench-learner`: python -m tests.bench.record_pools FOLDER STEP...

Runs configs/atlas.toml with Redis, retriever and one worker as processes and the learner in this one, until the last
STEP is committed. Writes FOLDER/stepNN.npz: the selected trajectories of a step end to end, and their advantages.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.types import Pool, Trajectory
from tests.conftest import free_port

ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"


def write_pool(path: Path, selected: Sequence[Trajectory], advantages: NDArray[np.float64]) -> None:
    """As arrays, which any version of this project can read."""
    np.savez_compressed(
        path,
        ticket=[t.ticket for t in selected],
        rollout=[t.rollout for t in selected],
        depth=[t.depth for t in selected],
        tokens=[len(t.token_ids) for t in selected],
        token_ids=np.concatenate([t.token_ids for t in selected]).astype(np.int32),
        sampled=np.concatenate([t.sampled for t in selected]),
        logprobs=np.concatenate([t.logprobs for t in selected]),
        versions=np.concatenate([t.versions for t in selected]).astype(np.int16),
        advantages=advantages,
    )


def record(config: Config, folder: Path, steps: Sequence[int]) -> None:
    from cusearch_async.cli.parts.fleet import Fleet
    from cusearch_async.processes import learner
    from cusearch_async.training.selector import advantages_of, candidates_of
    from cusearch_async.transport.buffer import RedisBuffer

    commit = RedisBuffer.commit

    async def recording(self: Any, pool: Pool, selected: Sequence[Trajectory], *method: Any) -> None:
        if pool.step in steps:
            places = {t.id: place for place, t in enumerate(pool)}
            indices = np.array([places[t.id] for t in selected])
            candidates = candidates_of(pool, config.episode.s_max)
            advantages = advantages_of(indices, candidates, pool.step, config.method.make(), config.method)
            write_pool(folder / f"step{pool.step:02d}.npz", selected, advantages.values)
        await commit(self, pool, selected, *method)

    RedisBuffer.commit = recording  # type: ignore[method-assign]
    with Fleet(config) as fleet:
        fleet.start_services()
        fleet.start_command("rollout-0", "worker", "rollout")
        learner.run(config)


def main() -> None:
    folder, steps = Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as run:
        given = {
            "run.steps": max(steps) + 1,
            "run.folder": Path(run) / "run",
            "redis.url": f"redis://127.0.0.1:{free_port()}/0",
            "retriever.url": f"http://127.0.0.1:{free_port()}",
        }
        config = load_config(ATLAS, [word for key, value in given.items() for word in (f"--{key}", str(value))])
        configure_process(config.learner.cores)
        record(config, folder, steps)


if __name__ == "__main__":
    main()
