"""Which GPUs of this machine a process takes.

`cusearch launch` divides the machine's GPUs among the processes that it starts. A process that is started without it
may be the only one on its machine: the learner takes the last GPUs that it sees, an engine the first that nobody has.
A GPU's number, in settings, `--gpu` and messages, is that of torch's cuda:N: it counts what the process may see. Only
`configure_process` changes that, in the process itself: those that it has started before count as it did.

File locks hold who has a GPU; the kernel releases them when their process ends for any reason. No two workers of one
user have the same GPU."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cusearch_async.config import Config, LearnerConfig
from cusearch_async.errors import ConfigError
from cusearch_async.files import try_lock
from cusearch_async.lifecycle.cuda import count_in_wsl, has_card, visible_names, visible_said

Gpus = tuple[str, ...]
"""GPUs by their number among those that this process sees; with `--gpu` also as CUDA_VISIBLE_DEVICES names them."""

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


def cuda_names() -> tuple[str, ...]:
    """What CUDA calls the GPUs that this process may see, by their number: the entries of CUDA_VISIBLE_DEVICES if it is
    set, else all of the machine. None without a driver: DeepSpeed's launcher sets the variable there too."""
    if not has_card():
        return ()
    if (visible := visible_names()) is not None:
        return visible
    cards = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts from 0, also in a container that has nvidia3 alone
    return tuple(map(str, range(len(cards) or count_in_wsl())))


def cuda_name(gpu: str) -> str:
    """What CUDA calls a GPU of this process, whatever the process sees."""
    names = cuda_names()
    return names[int(gpu)] if gpu.isdecimal() and names else gpu


def list_gpus() -> Gpus:
    return tuple(map(str, range(len(cuda_names()))))


def may_share(config: Config) -> bool:
    """Whether learner and engines may have the same GPU: colocated, or with a share of it that the config states."""
    return config.run.colocate or config.rollout.vllm.gpu_memory_utilization is not None


def divide(config: Config) -> Division:
    """What each process of `cusearch launch` takes of the GPUs that nobody has. What the config names is obeyed; else
    the learner takes the last ones, the evaluator those before, the workers the first. If there are too few, engines
    have the learner's too, where they may share.

    Raises: ConfigError when there are too few, or when one that is named is not there, or is named for two processes
    that may not share it."""
    there, named = list_gpus(), _seen("rollout.gpus", _names(config.rollout.gpus))
    own = _seen("learner.gpus", _names(config.learner.gpus))
    of_evaluator = _seen("eval.gpus", _names(config.eval.gpus)) if config.eval.every else ()
    workers, size = config.rollout.workers, config.rollout.vllm.tensor_parallel_size
    users, of_workers = _users((*there, *named)), _users(named, "worker")
    free_named = [gpu for gpu in named if not of_workers[gpu]]
    if named and len(free_named) // size < workers:
        raise ConfigError(
            f"rollout.gpus {list(config.rollout.gpus)} must name at least {workers * size} that are free, to start "
            f"rollout.workers ({workers}) on this machine with rollout.vllm.tensor_parallel_size ({size}) each"
            + "".join(f"; {user}" for user in of_workers.values() if user)
        )
    if not there:
        groups = _groups(size, named)[:workers] or [()] * workers
        return Division(learner=own, evaluator=of_evaluator, workers=groups)
    division = division_of(config, [gpu for gpu in there if not users[gpu]], free_named)
    if division is not None:
        _refuse_named_twice(config, division)
        return division
    evaluates = config.eval.every > 0
    advice = ["lower rollout.workers"] if workers > 1 else []
    advice += ["set eval.every to 0 and score checkpoints with cusearch eval"] if evaluates else []
    if not may_share(config):
        shares = "the share of a GPU that an engine may take, and it can have the learner's"
        advice = [f"set rollout.vllm.gpu_memory_utilization, {shares}"]
    raise ConfigError(
        f"this machine has {len(there)} GPUs ({', '.join(there)}), too few for {config.learner.ranks_per_node} of the "
        f"learner and {size} for each engine ({workers} for rollout.workers"
        f"{', 1 for the evaluator' if evaluates else ''}); {''.join(f'{user}; ' for user in users.values() if user)}"
        f"{', '.join(advice) or 'lower learner.ranks'}, or name GPUs in learner.gpus, rollout.gpus and eval.gpus"
    )


def _refuse_named_twice(config: Config, division: Division) -> None:
    evaluator = division.evaluator if config.eval.every else ()
    had = [
        *division.learner[: config.learner.ranks_per_node],
        *evaluator,
        *(gpu for group in division.workers for gpu in group),
    ]
    twice = sorted({gpu for gpu in had if had.count(gpu) > 1}, key=int)
    if twice and not may_share(config):
        lists = {"learner": config.learner.gpus, "rollout": config.rollout.gpus}
        lists |= {"eval": config.eval.gpus} if config.eval.every else {}
        named = [f"{key}.gpus {list(gpus)}" for key, gpus in lists.items() if {*_names(gpus)}.intersection(twice)]
        raise ConfigError(
            f"{', '.join(named)} name GPU {', '.join(twice)} twice; give each process its own, or set "
            "rollout.vllm.gpu_memory_utilization, the share of a GPU that an engine may take beside the learner"
        )


def division_of(config: Config, free: Sequence[str], named: Sequence[str]) -> Division | None:
    """How `divide` divides the `free` GPUs, of which those `named` are for workers; None when there are too few."""
    groups = _groups(config.rollout.vllm.tensor_parallel_size, named)[: config.rollout.workers]
    ways = (False, True) if may_share(config) else (False,)
    return next(filter(None, (_divide(config, free, groups, together) for together in ways)), None)


def _divide(config: Config, free: Sequence[str], named: list[Gpus], together: bool) -> Division | None:
    """A division of the `free` GPUs, with the groups that are `named` for workers; None when there are too few.
    `together`: engines may have the learner's."""
    learner, evaluator = _names(config.learner.gpus), _names(config.eval.gpus)
    of_workers, ranks = [gpu for group in named for gpu in group], config.learner.ranks_per_node
    size, workers = config.rollout.vllm.tensor_parallel_size, config.rollout.workers
    if not learner:
        learner = _without(free, () if together else (*of_workers, *evaluator))[-ranks:]
    of_learner = () if together else learner
    if config.eval.every and not evaluator:
        groups = _groups(size, reversed(_without(free, (*of_learner, *of_workers))))
        evaluator = groups[0][::-1] if groups else ()
    named = named or _groups(size, _without(free, (*of_learner, *evaluator)))[:workers]
    if len(learner) < ranks or len(named) < workers or (config.eval.every and not evaluator):
        return None
    return Division(learner=learner, evaluator=evaluator, workers=named)


# --- one process that is started without the others ---------------------------------------------------


def take_for_learner(learner: LearnerConfig, run: str, shared: bool, given: Gpus = ()) -> Gpus:
    """The GPUs of the learner of `run`, one for each rank of this machine: those `given`, those that the config names,
    or the last ones there; `shared`: engines may have them too. Every rank takes all. Empty where there are none.

    Raises: ConfigError when there are too few, or when one that was not named is another process's."""
    chosen = _seen("--gpu", given) or _seen("learner.gpus", _names(learner.gpus))
    wanted = learner.ranks_per_node
    gpus = chosen or list_gpus()[-wanted:]
    if not gpus:
        return ()
    if len(gpus) < wanted:
        raise ConfigError(
            f"the learner needs {wanted} GPUs on this machine, one for each rank, and has {len(gpus)} "
            f"({', '.join(gpus)}); lower learner.ranks, or let it have more (learner.gpus, --gpu, CUDA_VISIBLE_DEVICES)"
        )
    with _alone():
        found = () if chosen else gpus
        # a learner of this run is a rank of this one, or the learner that it replaces
        own = _described("learner", run)
        taken = [user for gpu in found if not (user := _user(gpu, "learner")).endswith(own)]
        taken += [] if shared else [_user(gpu, "worker", "evaluator") for gpu in found]
        if any(taken):
            raise ConfigError(
                f"{'; '.join(filter(None, taken))}; stop it, or name other GPUs in learner.gpus or with --gpu"
            )
        with ExitStack() as locks:
            for gpu in gpus:
                _lock(gpu, "learner", run, locks)
            _held.append(locks.pop_all())
    return gpus


def take_for_engine(role: Literal["worker", "evaluator"], config: Config, given: Gpus = ()) -> Gpus:
    """A group of rollout.vllm.tensor_parallel_size GPUs for the engine of a worker or the evaluator: those `given`,
    those that the config names, or the first group that nobody has. No two workers take the same. Empty where there
    are none.

    Raises: ConfigError that names who has each GPU."""
    key, named = ("rollout.gpus", config.rollout.gpus) if role == "worker" else ("eval.gpus", config.eval.gpus)
    chosen, there = _seen("--gpu", given) or _seen(key, _names(named)), list_gpus()
    size, seen = config.rollout.vllm.tensor_parallel_size, chosen or there
    if not seen:
        return ()
    with _alone():
        for group in _groups(size, chosen or _preferred(there, may_share(config))):
            with ExitStack() as locks:
                if all(_lock(gpu, role, config.run.name, locks) for gpu in group):
                    _held.append(locks.pop_all())
                    return group
        users = [_user(gpu, *(("worker",) if chosen else ROLES)) for gpu in seen]
    needed = "no GPU" if size == 1 else f"no group of {size} GPUs (rollout.vllm.tensor_parallel_size)"
    taken = "; ".join(filter(None, users)) or f"there are {len(seen)} ({', '.join(seen)})"
    raise ConfigError(f"{needed} of {key} is free: {taken}; stop one of them, or name more GPUs in {key} or with --gpu")


def _preferred(there: Gpus, shared: bool) -> Gpus:
    """What an engine may take of GPUs that were not named, best first: those that nobody has, then, if they may be
    `shared`, those that no worker has."""
    free = [gpu for gpu in there if not _user(gpu)]
    return (*free, *(gpu for gpu in there if shared and gpu not in free and not _user(gpu, "worker")))


# --- locks --------------------------------------------------------------------------------------------
# A GPU has a file for each role, by CUDA's name, whatever its number in a process: a worker locks its own alone; ranks
# of a learner, or evaluators, lock theirs together. A config may give one GPU to all three.

ROLES: tuple[Role, ...] = get_args(Role)
BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def _alone() -> Iterator[None]:
    """No other process looks for GPUs meanwhile, so that what is free stays free."""
    with (_folder() / "looking").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            why = f"{file.name} cannot be locked ({error.strerror})"
            raise ConfigError(f"{why}; set TMPDIR to a folder on a disk of this machine") from error
        yield


def _folder() -> Path:
    """Of this machine: others may have the same TMPDIR, on a network. Raises: ConfigError when another user has made
    it, who could lead our files elsewhere."""
    folder = Path(tempfile.gettempdir()) / f"cusearch-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder.lstat()
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not a folder of this user; remove it, or set TMPDIR to another place")
    own = folder / BOOT.read_text(encoding="utf-8").strip()  # which a machine's containers share
    own.mkdir(exist_ok=True)
    return own


def _file(gpu: str, role: Role) -> Path:
    return _folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', cuda_name(gpu))}.{role}"


def _lock(gpu: str, role: Role, run: str, locks: ExitStack) -> bool:
    """Lock a GPU until `locks` are closed; False when another worker has it."""
    file = locks.enter_context(_file(gpu, role).open("a+", encoding="utf-8"))
    if not try_lock(file, fcntl.LOCK_EX if role == "worker" else fcntl.LOCK_SH):
        return False
    file.truncate(0)
    file.write(f"process {os.getpid()}{_described(role, run)}")
    file.flush()
    return True


def _described(role: Role, run: str) -> str:
    return f"{'' if role == 'worker' else f', the {role}'} of run {run}"


def _users(gpus: Gpus, *roles: Role) -> dict[str, str]:
    """GPU -> `_user`, for a process that takes none of them itself."""
    if not gpus:
        return {}
    with _alone():
        return {gpu: _user(gpu, *roles) for gpu in gpus}


def _user(gpu: str, *roles: Role) -> str:
    """Who has a GPU in one of these roles (in any, if none is named), in words; empty for nobody."""
    for path in (_file(gpu, role) for role in roles or ROLES):
        if path.exists():
            with path.open("r+", encoding="utf-8") as file:  # on NFS only a file that can be written is locked alone
                if not try_lock(file, fcntl.LOCK_EX):
                    name = "" if cuda_name(gpu) == gpu else f" ({cuda_name(gpu)} in CUDA_VISIBLE_DEVICES)"
                    return f"GPU {gpu}{name} is taken by {file.read() or 'another process'}"
    return ""


def _groups(size: int, gpus: Iterable[str]) -> list[Gpus]:
    """`gpus` in groups of `size`; those that are left over are in none."""
    names = tuple(gpus)
    return [names[i : i + size] for i in range(0, len(names) - size + 1, size)]


def _without(gpus: Iterable[str], taken: Iterable[str]) -> Gpus:
    """`gpus` in their order, but for those that are `taken`."""
    excluded = set(taken)
    return tuple(gpu for gpu in gpus if gpu not in excluded)


def _names(gpus: Sequence[int]) -> Gpus:
    return tuple(map(str, gpus))


def _seen(key: str, gpus: Gpus) -> Gpus:
    """`gpus`, which `key` names. Without a driver any number is allowed: `require_gpus` says what CUDA finds.

    Raises: ConfigError for a number or name that no GPU of this process has."""
    there = list_gpus()
    names = cuda_names()  # a UUID only where CUDA names it: else its lock is not that of its number
    missing = [gpu for gpu in gpus if has_card() and gpu not in (there if gpu.isdecimal() else names)]
    if missing:
        raise ConfigError(
            f"{key} names GPU {', '.join(missing)}, but this process sees {len(there) or 'none'}{visible_said()}; "
            "name them by their numbers there, from 0, as torch's cuda:N does"
        )
    return gpus
