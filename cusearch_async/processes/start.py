"""The processes of a run: `python -m cusearch_async.processes.start NAME CONFIG [--section.key value]...`.

This is a separate module because no large library may be imported before `configure_process` has run. It is not called
`__main__` because multiprocessing does not import a `__main__` module in the engine's process (see
`lifecycle.spawned`)."""

from __future__ import annotations

from cusearch_async.lifecycle.entry import (
    Parser,
    exit_with_one_line,
    log_to_stderr,
    own_modules_last,
    quick_to_interrupt,
)
from cusearch_async.lifecycle.spawned import die_with_worker

die_with_worker()
own_modules_last()
with quick_to_interrupt():
    import argparse
    import asyncio
    import functools
    import os
    import secrets
    import socket
    from collections.abc import Callable
    from pathlib import Path

    import uvloop

    from cusearch_async.config import CONFIG_HELP, Config, load_config
    from cusearch_async.errors import ConfigError
    from cusearch_async.lifecycle.children import other_ranks
    from cusearch_async.lifecycle.gpus import Gpus, take_for_evaluator, take_for_learner, take_for_worker
    from cusearch_async.lifecycle.launcher import launched_ranks
    from cusearch_async.lifecycle.placement import (
        configure_process,
        count_sharers,
        lower_priority,
        require_gpus,
        share_of,
    )

MODULE = "cusearch_async.processes.start"


def learner(config: Config, gpu: Gpus = (), accept_changes: bool = False) -> None:
    """Claims pools, selects, trains, publishes weights.

    With learner.ranks > 1 it starts the other ranks itself; under a launcher it is the rank in RANK. `gpu`: the GPUs
    of all ranks of this machine."""
    gpus = take_for_learner(config, gpu)
    with other_ranks(MODULE, config.learner.ranks) as rank:
        here = config.learner.ranks_per_node
        configure_process(share_of(config.learner.cores, rank % here, here), gpus, count_sharers(config))
        # Batches of many shapes fragment a GPU's memory. Not for vLLM's processes: its sleep mode has to switch this
        # off, and its transfers between processes refuse it or get slower.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        require_gpus("learner.gpus", gpus)
        from cusearch_async.processes import learner  # noqa: PLC0415  (torch reads the settings above when loaded)

        learner.run(config, accept_changes)


def rollout(config: Config, gpu: Gpus = ()) -> None:
    """Plays episodes with the newest weights, and puts the trajectories into the buffer."""
    index = int(os.environ.get("CUSEARCH_WORKER_INDEX", "0"))
    gpus = take_for_worker(config, gpu)
    every_core = os.sched_getaffinity(0)
    configure_process(share_of(config.rollout.cores, index, config.rollout.workers), gpus, count_sharers(config))
    require_gpus("rollout.gpus", gpus)
    from cusearch_async.processes import rollout  # noqa: PLC0415  (libraries read the settings above when loaded)

    uvloop.run(rollout.run(config, worker_name(), every_core))


def worker_name() -> str:
    """HOST-PID-XXXX: containers may have the same host name, and the same process numbers."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def evaluator(config: Config, gpu: Gpus = ()) -> None:
    """Scores published versions on held-out questions during the run."""
    if not config.eval.every:
        raise ConfigError("eval.every is 0, so no version is scored during the run; set it to a number of steps")
    lower_priority()
    gpus = take_for_evaluator(config, gpu)
    configure_process(config.eval.cores, gpus, count_sharers(config))
    require_gpus("eval.gpus", gpus)
    from cusearch_async.processes import evaluator  # noqa: PLC0415  (libraries read the settings above when loaded)

    uvloop.run(evaluator.run(config))


def retriever(config: Config) -> None:
    """Serves searches over a corpus, `POST /retrieve`."""
    configure_process([], sharers=count_sharers(config))
    from cusearch_async.processes import retriever  # noqa: PLC0415  (libraries read the settings above when loaded)

    asyncio.run(retriever.run(config))


PROCESSES: dict[str, Callable[..., None]] = {
    "retriever": retriever,
    "learner": learner,
    "rollout": rollout,
    "evaluator": evaluator,
}


def _gpus(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> None:
    parser = Parser(
        prog=f"python -m {MODULE}",
        description="One process of a run.",
        epilog="Settings of the config can be overridden: --section.key value",
    )
    parser.add_argument("name", choices=PROCESSES, help="which process")
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument(
        "--gpu", type=_gpus, default=(), metavar="0,1", help="use these GPUs, not those of the config or free ones"
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="learner: continue with settings that change what the run means"
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher; as LOCAL_RANK
    with quick_to_interrupt():
        arguments, overrides = parser.parse()
    log_to_stderr(arguments.name)
    process = PROCESSES[arguments.name]
    if arguments.name != "retriever":
        process = functools.partial(process, gpu=arguments.gpu)
    if arguments.name == "learner":
        process = functools.partial(process, accept_changes=arguments.accept_changes)
    with exit_with_one_line(arguments.name):
        config = load_config(arguments.config, overrides)
        if arguments.name == "learner":
            config = load_config(arguments.config, [*overrides, *launched_ranks(config.learner)])
        process(config)


if __name__ == "__main__":
    main()
