"""The learner's ranks, as a launcher (torchrun, DeepSpeed's, a wrapper of srun) states them in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cusearch_async.config import Config, LearnerConfig, load_config
from cusearch_async.errors import ConfigError

_PER_NODE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""The ranks of this node: torchrun's name, and the name that DeepSpeed's launcher has for it."""


def load_launched(paths: Path | Sequence[Path], overrides: Sequence[str]) -> Config:
    """As `load_config`, for a process that is a rank of the learner. Raises: ConfigError, also of `launched_ranks`."""
    given = load_config(paths, overrides)
    return load_config(paths, [*overrides, *launched_ranks(given.learner)])


def launched_ranks(given: LearnerConfig, env: Mapping[str, str] = os.environ) -> list[str]:
    """Overrides for the learner's ranks and nodes as a launcher started them: WORLD_SIZE is learner.ranks, and divided
    by LOCAL_WORLD_SIZE it is learner.nodes. None without a launcher.

    Raises: ConfigError when `given` states other numbers, or the nodes have different numbers of ranks."""
    if "WORLD_SIZE" not in env:
        if given.nodes > 1:
            raise ConfigError(
                f"learner.nodes = {given.nodes}, but WORLD_SIZE is not set: start the learner on each of the nodes "
                "with a launcher, like torchrun"
            )
        return []
    ranks = _number(env, "WORLD_SIZE")
    here = ranks_here(ranks // given.nodes, env)
    if not here:
        raise ConfigError(f"this run has {ranks} ranks for learner.nodes = {given.nodes}; each node needs one")
    if ranks % here:
        raise ConfigError(f"this node has {here} of the learner's {ranks} ranks; start equally many on each node")
    launched = {"ranks": ranks, "nodes": ranks // here}
    for key, variable in (("ranks", "WORLD_SIZE"), ("nodes", "WORLD_SIZE / LOCAL_WORLD_SIZE")):
        if key in given.model_fields_set and getattr(given, key) != launched[key]:
            raise ConfigError(
                f"learner.{key} = {getattr(given, key)}, but {variable} is {launched[key]}; set both to the same "
                f"number, or leave learner.{key} out"
            )
    return [f"--learner.{key}={number}" for key, number in launched.items()]


def ranks_here(otherwise: int, env: Mapping[str, str] = os.environ) -> int:
    """The ranks of this node, if a launcher states them."""
    return next((_number(env, name) for name in _PER_NODE if name in env), otherwise)


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal() or not int(env[name]):
        raise ConfigError(f"{name} is {env[name]!r} in the environment; launchers set it to a number of ranks")
    return int(env[name])
