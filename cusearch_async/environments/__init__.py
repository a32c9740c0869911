"""Environments by name."""

from __future__ import annotations

from cusearch_async.environments.agent import AgentEnvironment
from cusearch_async.environments.base import (
    DONE,
    Environment,
    EnvironmentSettings,
    Episode,
    NoSearch,
    Observation,
    Reward,
    Score,
    Search,
)
from cusearch_async.environments.search import SearchEnvironment
from cusearch_async.environments.templates import Quoted, Template, template_of, template_text
from cusearch_async.extensions import load, load_function

ENVIRONMENTS: dict[str, type[Environment]] = {"search": SearchEnvironment, "agent": AgentEnvironment}


def environment_class(key: str, name: str) -> type[Environment]:
    """One of ENVIRONMENTS, or a user's own as `package.module:Class`. Raises: ConfigError that names `key`."""
    return ENVIRONMENTS.get(name) or load(key, name, Environment, ENVIRONMENTS)


def reward_function(key: str, name: str) -> Reward:
    """A user's own reward, `package.module:function`. Raises: ConfigError that names `key`."""
    return load_function(key, name)
