"""Which GPUs of this machine a process takes.

What the config does not name is divided: the learner takes the last ones, engines the others. An engine claims its
group with file locks, which the kernel releases when the process ends for any reason: so no two engines of one user
ever have the same GPU."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.cuda import has_card

Gpus = tuple[str, ...]
"""CUDA devices by index or UUID, as CUDA_VISIBLE_DEVICES names them."""

_held: list[ExitStack] = []
"""Locks of this process, until it ends."""


def list_gpus() -> Gpus:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES if it is set, else all of the machine. None
    where no driver is loaded: DeepSpeed's launcher sets the variable there too."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_card():
        return ()
    if visible is not None:
        return tuple(name for name in re.split(r"\s*,\s*", visible.strip()) if name not in ("", "-1"))
    cards = [re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*")]
    return tuple(str(index) for index in sorted(int(card[1]) for card in cards if card))


def learner_gpus(config: Config, there: Gpus) -> Gpus:
    """The learner's GPUs of those that are `there`; empty where there are none. A launcher that has assigned just as
    many as the ranks need is obeyed.

    Raises: ConfigError when too few are left for it."""
    if config.learner.gpus or not there:
        return _names(config.learner.gpus)
    if {"WORLD_SIZE", "CUDA_VISIBLE_DEVICES"} <= os.environ.keys() and len(there) == config.learner.ranks_per_node:
        return there
    of_engines = () if config.run.take_turns else _names((*config.rollout.gpus, *config.eval.gpus))
    free = [gpu for gpu in there if gpu not in of_engines]
    wanted = config.learner.ranks_per_node
    if len(free) < wanted or (not config.rollout.gpus and len(free) < wanted + _of_engines(config)):
        raise ConfigError(_too_few(config, there))
    return tuple(free[-wanted:])


def engine_groups(config: Config, there: Gpus) -> list[Gpus]:
    """Groups of rollout.vllm.tensor_parallel_size GPUs, one for each engine of the rollout workers; empty where there
    are none. Raises: ConfigError when too few are left for them."""
    size = config.rollout.vllm.tensor_parallel_size
    if config.rollout.gpus or not there:
        named = _names(config.rollout.gpus)
        return [named[i : i + size] for i in range(0, len(named) - size + 1, size)]
    taken = (*_of_the_learner(config, there), *evaluator_gpus(config, there))
    free = [gpu for gpu in there if gpu not in taken]
    if len(free) < size:
        raise ConfigError(_too_few(config, there))
    return [tuple(free[i : i + size]) for i in range(0, len(free) - size + 1, size)]


def evaluator_gpus(config: Config, there: Gpus) -> Gpus:
    """The evaluator's GPUs: the last ones that the learner leaves. Raises: ConfigError when too few are left."""
    if config.eval.gpus or not there or not config.eval.every:
        return _names(config.eval.gpus)
    taken = (*_of_the_learner(config, there), *_names(config.rollout.gpus))
    free = [gpu for gpu in there if gpu not in taken]
    size = config.rollout.vllm.tensor_parallel_size
    if len(free) < size:
        raise ConfigError(_too_few(config, there))
    return tuple(free[-size:])


def claim(groups: Sequence[Gpus], key: str, run: str) -> Gpus:
    """The first of `groups` that no other engine has; it is this process's until it ends. Empty where there are none.

    Raises: ConfigError that says who has each GPU."""
    taken: list[str] = []
    for group in groups:
        with ExitStack() as locks:
            owners = [owner for gpu in group if (owner := _lock(gpu, run, locks))]
            if not owners:
                _held.append(locks.pop_all())
                return group
            taken += owners
    if not taken:
        return ()
    raise ConfigError(
        f"no GPU of {key} is free: {'; '.join(taken)}; stop one of them, or name more GPUs in {key} or with --gpu"
    )


def _lock(gpu: str, run: str, locks: ExitStack) -> str:
    """Lock a GPU until `locks` are closed. Who has it already, in words; empty when this process has got it."""
    folder = Path(tempfile.gettempdir()) / f"cusearch-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = locks.enter_context((folder / re.sub(r"[^A-Za-z0-9-]", "_", gpu)).open("a+", encoding="utf-8"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return f"GPU {gpu} is taken by {file.read() or 'another process'}"
    file.truncate(0)
    file.write(f"process {os.getpid()} of run {run}")
    file.flush()
    return ""


def _of_the_learner(config: Config, there: Gpus) -> Gpus:
    """What engines must leave to the learner."""
    return () if config.run.take_turns else learner_gpus(config, there)


def _names(gpus: Sequence[int]) -> Gpus:
    return tuple(map(str, gpus))


def _of_engines(config: Config) -> int:
    """GPUs that the engines of this machine need and cannot have in turn with the learner or on another machine."""
    engines = config.rollout.workers + (1 if config.eval.every and not config.eval.gpus else 0)
    has_others = config.learner.nodes > 1 or config.run.take_turns
    return 0 if has_others else engines * config.rollout.vllm.tensor_parallel_size


def _too_few(config: Config, there: Gpus) -> str:
    size = config.rollout.vllm.tensor_parallel_size
    engines = f"{config.rollout.workers} for rollout.workers" + (", 1 for the evaluator" if config.eval.every else "")
    return (
        f"this machine has {len(there)} GPUs ({', '.join(there)}), too few for {config.learner.ranks_per_node} of the "
        f"learner and {size} for each engine ({engines}); name them in learner.gpus, rollout.gpus and eval.gpus: one "
        "GPU may be in several where rollout.vllm.gpu_memory_utilization leaves room"
    )
