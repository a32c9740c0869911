"""The processes of a run, as `cusearch worker NAME CONFIG` starts them.

No large library may be imported before `configure_process` has run."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.children import ENTRY, other_ranks
from cusearch_async.lifecycle.entry import STOPPED
from cusearch_async.lifecycle.gpus import Gpus, may_share, take_for_engine, take_for_learner
from cusearch_async.lifecycle.placement import (
    LAUNCHED,
    configure_process,
    count_sharers,
    lower_priority,
    require_gpus,
    share_of,
)
from cusearch_async.lifecycle.signals import ending


@contextmanager
def rank_of_learner(config: Config, gpu: Gpus = (), is_alone: bool = False) -> Iterator[None]:
    """This process as a rank of the learner, its cores and GPUs chosen. With learner.ranks > 1 it starts the other
    ranks itself; under a launcher it is the rank in RANK. `gpu`: the GPUs of all ranks of this machine. `is_alone`: the
    cores of the run's engines are the learner's, too."""
    gpus = take_for_learner(config.learner, config.run.name, may_share(config), gpu)
    with other_ranks(ENTRY, config.learner.ranks) as rank:
        here = config.learner.ranks_per_node
        local = int(os.environ.get("LOCAL_RANK", rank % here))  # a launcher may deal ranks out to nodes in turn
        os.environ.setdefault("LOCAL_RANK", str(local))  # DeepSpeed takes this GPU
        cores, sharers = config.learner.cores, count_sharers(config, here)
        if is_alone:
            cores, sharers = tuple(sorted({*cores, *config.rollout.cores})) if cores else (), here
        configure_process(share_of(cores, local, here), gpus, sharers)
        # Batches of many shapes fragment a GPU's memory. Not for vLLM's processes, whose sleep mode refuses it.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        require_gpus("learner.gpus", gpus)
        yield


def learner(config: Config, gpu: Gpus = (), accept_changes: bool = False) -> None:
    """Claims pools, selects, trains, publishes weights."""
    with rank_of_learner(config, gpu):
        from cusearch_async.processes import learner  # noqa: PLC0415  (torch reads the settings above when loaded)

        is_finished = learner.run(config, accept_changes)
    if not is_finished and LAUNCHED not in os.environ:
        sys.exit(STOPPED)  # as below; and torchrun on another node would not start its ranks again


def rollout(config: Config, gpu: Gpus = ()) -> None:
    """Runs episodes with the newest weights, and puts the trajectories into the buffer."""
    index = os.environ.get("CUSEARCH_WORKER_INDEX")
    gpus = take_for_engine("worker", config, gpu)
    every_core, cores = os.sched_getaffinity(0), config.rollout.cores
    own = cores if index is None else share_of(cores, int(index), config.rollout.workers)
    configure_process(own, gpus, count_sharers(config))
    require_gpus("rollout.gpus", gpus)
    from cusearch_async.processes import rollout  # noqa: PLC0415  (libraries read the settings above when loaded)

    if not uvloop.run(ending(rollout.run(config, worker_name(), every_core))):
        sys.exit(STOPPED)  # 0 would tell Kubernetes that the work of a worker that was drained is done


def worker_name() -> str:
    """HOST-PID-XXXX: containers may have the same host name, and the same process numbers."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def evaluator(config: Config, gpu: Gpus = ()) -> None:
    """Scores published versions on held-out questions during the run."""
    if not config.eval.every:
        raise ConfigError("eval.every is 0, so no version is scored during the run; set it to a number of steps")
    lower_priority()
    gpus = take_for_engine("evaluator", config, gpu)
    configure_process(config.eval.cores, gpus, count_sharers(config))
    require_gpus("eval.gpus", gpus)
    from cusearch_async.processes import evaluator  # noqa: PLC0415  (libraries read the settings above when loaded)

    if not uvloop.run(ending(evaluator.run(config))) and LAUNCHED not in os.environ:
        sys.exit(STOPPED)  # as a worker's


def retriever(config: Config) -> None:
    """Serves searches over a corpus, `POST /retrieve`."""
    configure_process([], sharers=count_sharers(config))
    from cusearch_async.processes import retriever  # noqa: PLC0415  (libraries read the settings above when loaded)

    asyncio.run(retriever.run(config))


def relay(config: Config) -> None:
    """Downloads published weights once, and serves them to the machines near it."""
    configure_process([], sharers=count_sharers(config))
    from cusearch_async.processes import relay  # noqa: PLC0415  (as above)

    asyncio.run(relay.run(config))


PROCESSES: dict[str, Callable[..., None]] = {
    "retriever": retriever,
    "relay": relay,
    "learner": learner,
    "rollout": rollout,
    "evaluator": evaluator,
}
