"""Which GPUs of this machine a process takes.

`cusearch launch` starts all processes of a run on one machine, so it divides the machine's GPUs among them and tells
each its own. A process that is started without it may be the only one on its machine, so nothing is kept for others:
the learner takes the last GPUs that it sees, an engine the first that nobody has. Who has a GPU is known by file locks,
which the kernel releases when their process ends for any reason. No two workers of one user have the same GPU."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.cuda import has_card

Gpus = tuple[str, ...]
"""CUDA devices by index or UUID, as CUDA_VISIBLE_DEVICES names them."""

Role = Literal["worker", "learner", "evaluator"]

DEVICES = Path("/dev")
"""Where the driver has one file for each card that this process may see."""

_held: list[ExitStack] = []
"""Locks of this process, until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The GPUs of each process that `cusearch launch` starts; empty where there are none."""

    learner: Gpus
    evaluator: Gpus
    workers: list[Gpus]
    """One group for each of rollout.workers."""


@dataclass(frozen=True, slots=True)
class Users:
    """Who has a GPU, in words; each is empty for nobody."""

    worker: str
    learner: str
    evaluator: str

    @property
    def any(self) -> str:
        return self.worker or self.learner or self.evaluator

    @property
    def engine(self) -> str:
        return self.worker or self.evaluator


def list_gpus() -> Gpus:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES if it is set, else all of the machine. None
    where no driver is loaded: DeepSpeed's launcher sets the variable there too."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_card():
        return ()
    if visible is not None:
        return tuple(name for name in re.split(r"\s*,\s*", visible.strip()) if name not in ("", "-1"))
    cards = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(map(str, range(len(cards))))  # CUDA counts from 0, also in a container that has nvidia3 alone


def may_share(config: Config) -> bool:
    """Whether learner and engines may have the same GPU: in turn, or with a share of it that the config states."""
    return config.run.colocate or config.rollout.vllm.gpu_memory_utilization is not None


# --- all processes of a run on one machine ------------------------------------------------------------


def divide(config: Config) -> Division:
    """What each process of `cusearch launch` takes of the GPUs that nobody has. What the config names is obeyed; else
    the learner takes the last ones, the evaluator those before, the workers the first. Where there are too few for
    that, engines have the learner's too, if they `may_share`.

    Raises: ConfigError when there are too few."""
    there, named, workers = list_gpus(), _names(config.rollout.gpus), config.rollout.workers
    users = _users_now((*there, *named))
    groups = _groups(config, (gpu for gpu in named if not users[gpu].worker))[:workers]
    if named and len(groups) < workers:
        raise ConfigError(_too_few_named(config, [users[gpu].worker for gpu in named]))
    if not there:
        own = _names(config.learner.gpus), _names(config.eval.gpus)
        return Division(learner=own[0], evaluator=own[1], workers=groups or [()] * workers)
    free = [gpu for gpu in there if not users[gpu].any]
    for together in (False, True) if may_share(config) else (False,):
        division = _divide(config, free, groups, together)
        if division is not None:
            return division
    raise ConfigError(_too_few(config, there, [users[gpu].any for gpu in there]))


def _divide(config: Config, free: Sequence[str], named: list[Gpus], together: bool) -> Division | None:
    """A division of the `free` GPUs, with the groups that are `named` for workers; None when there are too few.
    `together`: engines may have the learner's."""
    learner, evaluator = _names(config.learner.gpus), _names(config.eval.gpus)
    of_workers, ranks = [gpu for group in named for gpu in group], config.learner.ranks_per_node
    if not learner:
        learner = _without(free, () if together else (*of_workers, *evaluator))[-ranks:]
    of_learner = () if together else learner
    if config.eval.every and not evaluator:
        groups = _groups(config, reversed(_without(free, (*of_learner, *of_workers))))
        evaluator = groups[0][::-1] if groups else ()
    workers = named or _groups(config, _without(free, (*of_learner, *evaluator)))[: config.rollout.workers]
    if len(learner) < ranks or len(workers) < config.rollout.workers or (config.eval.every and not evaluator):
        return None
    return Division(learner=learner, evaluator=evaluator, workers=workers)


# --- one process that is started without the others ---------------------------------------------------


def take_for_learner(config: Config, given: Gpus = ()) -> Gpus:
    """The learner's GPUs, one for each rank of this machine: those `given`, those that the config names, or the last
    ones there. Every rank takes all of them. Empty where there are none.

    Raises: ConfigError when there are too few, or when one that was not named is another process's."""
    chosen, wanted = given or _names(config.learner.gpus), config.learner.ranks_per_node
    gpus = chosen or list_gpus()[-wanted:]
    if not gpus:
        return ()
    if len(gpus) < wanted:
        raise ConfigError(
            f"the learner needs {wanted} GPUs on this machine, one for each rank, and has {len(gpus)} "
            f"({', '.join(gpus)}); lower learner.ranks, or let it have more (learner.gpus, --gpu, CUDA_VISIBLE_DEVICES)"
        )
    with _alone():
        found = {} if chosen else _users(gpus)
        # what has "the learner of this run" is a rank of it, or the learner that it replaces
        others = [user.learner for user in found.values() if not user.learner.endswith(_says("learner", config))]
        engines = [] if may_share(config) else [user.engine for user in found.values()]
        taken = [user for user in (*others, *engines) if user]
        if taken:
            raise ConfigError(f"{'; '.join(taken)}; stop it, or name other GPUs in learner.gpus or with --gpu")
        _share(gpus, "learner", config)
    return gpus


def take_for_worker(config: Config, given: Gpus = ()) -> Gpus:
    """A group of rollout.vllm.tensor_parallel_size GPUs for a worker's engine: those `given`, or the first group that
    no other worker has, of those that the config names or of those that are there. Empty where there are none.

    Raises: ConfigError that says who has each GPU."""
    chosen, there = given or _names(config.rollout.gpus), list_gpus()
    if not (chosen or there):
        return ()
    with _alone():
        for group in _groups(config, chosen or _preferred(config, there)):
            with ExitStack() as locks:
                if all(_lock(gpu, "worker", config, locks) for gpu in group):
                    _held.append(locks.pop_all())
                    return group
        users = _users(chosen or there)
    taken = [user.worker if chosen else user.any for user in users.values()]
    raise ConfigError(_none_free("rollout.gpus", config, users, taken))


def take_for_evaluator(config: Config, given: Gpus = ()) -> Gpus:
    """The evaluator's GPUs: those `given`, those that the config names, or the first that nobody has. Empty where there
    are none. Raises: ConfigError that says who has each GPU."""
    chosen, there = given or _names(config.eval.gpus), list_gpus()
    if not (chosen or there):
        return ()
    with _alone():
        groups = _groups(config, chosen or _preferred(config, there))
        if not groups:
            users = _users(chosen or there)
            raise ConfigError(_none_free("eval.gpus", config, users, [user.any for user in users.values()]))
        _share(groups[0], "evaluator", config)
    return groups[0]


def _preferred(config: Config, there: Gpus) -> Gpus:
    """What an engine may take of GPUs that were not named, best first: those that nobody has, then, if they `may_share`
    one, those that no worker has."""
    users = _users(there)
    free = [gpu for gpu in there if not users[gpu].any]
    shared = [gpu for gpu in there if users[gpu].any and not users[gpu].worker]
    return (*free, *(shared if may_share(config) else ()))


# --- locks --------------------------------------------------------------------------------------------
# A GPU has a file for each role: a worker locks its own alone; ranks of a learner, or evaluators, lock theirs together.
# A config may give one GPU to all three.


@contextmanager
def _alone() -> Iterator[None]:
    """No other process looks for GPUs meanwhile, so that what is free stays free."""
    with (_folder() / "looking").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _users_now(gpus: Gpus) -> dict[str, Users]:
    """`_users`, for who takes none of them itself."""
    if not gpus:
        return {}
    with _alone():
        return _users(gpus)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"cusearch-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _file(gpu: str, role: Role) -> Path:
    return _folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.{role}"


def _lock(gpu: str, role: Role, config: Config, locks: ExitStack) -> bool:
    """Lock a GPU until `locks` are closed; False when another process has it."""
    file = locks.enter_context(_file(gpu, role).open("a+", encoding="utf-8"))
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if role == "worker" else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.truncate(0)
    file.write(f"process {os.getpid()}{_says(role, config)}")
    file.flush()
    return True


def _share(gpus: Gpus, role: Role, config: Config) -> None:
    """Let others see, until this process ends, that it uses `gpus`."""
    locks = ExitStack()
    for gpu in gpus:
        _lock(gpu, role, config, locks)
    _held.append(locks)


def _says(role: Role, config: Config) -> str:
    return f"{'' if role == 'worker' else f', the {role}'} of run {config.run.name}"


def _users(gpus: Iterable[str]) -> dict[str, Users]:
    return {gpu: Users(_user(gpu, "worker"), _user(gpu, "learner"), _user(gpu, "evaluator")) for gpu in gpus}


def _user(gpu: str, role: Role) -> str:
    path = _file(gpu, role)
    if not path.exists():
        return ""
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"GPU {gpu} is taken by {file.read() or 'another process'}"
    return ""


# --- words --------------------------------------------------------------------------------------------


def _none_free(key: str, config: Config, seen: Iterable[str], users: Sequence[str]) -> str:
    """That an engine finds no group among the GPUs `seen`, and who has them."""
    size, names = config.rollout.vllm.tensor_parallel_size, list(seen)
    taken = "; ".join(user for user in users if user) or f"there are {len(names)} ({', '.join(names)})"
    needed = "no GPU" if size == 1 else f"no group of {size} GPUs (rollout.vllm.tensor_parallel_size)"
    return f"{needed} of {key} is free: {taken}; stop one of them, or name more GPUs in {key} or with --gpu"


def _too_few_named(config: Config, users: Sequence[str]) -> str:
    workers, size = config.rollout.workers, config.rollout.vllm.tensor_parallel_size
    taken = "".join(f"; {user}" for user in users if user)
    return (
        f"rollout.gpus {list(config.rollout.gpus)} must name at least {workers * size} that are free, to start "
        f"rollout.workers ({workers}) on this machine with rollout.vllm.tensor_parallel_size ({size}) each{taken}"
    )


def _too_few(config: Config, there: Gpus, users: Sequence[str]) -> str:
    size = config.rollout.vllm.tensor_parallel_size
    engines = f"{config.rollout.workers} for rollout.workers" + (", 1 for the evaluator" if config.eval.every else "")
    taken = "".join(f"{user}; " for user in users if user)
    return (
        f"this machine has {len(there)} GPUs ({', '.join(there)}), too few for {config.learner.ranks_per_node} of the "
        f"learner and {size} for each engine ({engines}); {taken}{_advice(config)}, or name GPUs in learner.gpus, "
        "rollout.gpus and eval.gpus"
    )


def _advice(config: Config) -> str:
    if not may_share(config):
        return (
            "set rollout.vllm.gpu_memory_utilization, the share of a GPU that an engine may take, and it can have the "
            "learner's"
        )
    fewer = ["lower rollout.workers"] if config.rollout.workers > 1 else []
    later = ["set eval.every to 0 and score checkpoints with cusearch eval"] if config.eval.every else []
    return ", ".join((*fewer, *later)) or "lower learner.ranks"


def _groups(config: Config, gpus: Iterable[str]) -> list[Gpus]:
    """`gpus` in groups of rollout.vllm.tensor_parallel_size; those that are left over are in none."""
    size, names = config.rollout.vllm.tensor_parallel_size, tuple(gpus)
    return [names[i : i + size] for i in range(0, len(names) - size + 1, size)]


def _without(gpus: Iterable[str], taken: Iterable[str]) -> Gpus:
    """`gpus` in their order, but for those that are `taken`."""
    excluded = set(taken)
    return tuple(gpu for gpu in gpus if gpu not in excluded)


def _names(gpus: Sequence[int]) -> Gpus:
    return tuple(map(str, gpus))
