"""The learner: pulls pools, selects, trains, publishes weights.

With learner.ranks > 1 it starts the other ranks itself; under torchrun it is the rank that RANK says."""

from __future__ import annotations

from cusearch_async import host
from cusearch_async.config import Config


def main(config: Config) -> None:
    with host.other_ranks("workers.learner", config.learner.ranks) as rank:
        host.settle(host.share_of(config.learner.cores, rank, config.learner.ranks), config.learner.gpus)
        from cusearch_async.processes import learner  # noqa: PLC0415  (torch reads the settings above when loaded)

        learner.run(config)


if __name__ == "__main__":
    host.run_worker("learner", main)
