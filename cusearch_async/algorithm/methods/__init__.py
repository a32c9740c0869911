"""Selection methods by name."""

from __future__ import annotations

from typing import Any

from cusearch_async.algorithm.methods.ar3po import Ar3po
from cusearch_async.algorithm.methods.base import Candidates, Method, MethodSettings, NoMemory, PlansRollouts, Selection
from cusearch_async.algorithm.methods.baselines import Dapo, GrpoFull, GrpoHalf, Random, StratifiedGrpo, TopKReward
from cusearch_async.algorithm.methods.controls import RandomSiblings, RandomTokens
from cusearch_async.algorithm.methods.sdga import SdgaAnti, SdgaAuto, SdgaPhase
from cusearch_async.extensions import load

METHODS: dict[str, type[Method[Any]]] = {
    "sdga_phase": SdgaPhase,
    "sdga_auto": SdgaAuto,
    "sdga_anti": SdgaAnti,
    "random": Random,
    "topk_reward": TopKReward,
    "grpo_full": GrpoFull,
    "grpo_half": GrpoHalf,
    "dapo": Dapo,
    "ar3po": Ar3po,
    "stratified_grpo": StratifiedGrpo,
    "random_tokens": RandomTokens,
    "random_siblings": RandomSiblings,
}


def method_class(name: str) -> type[Method[Any]]:
    """One of METHODS, or a user's own as `package.module:Class`. Raises: ConfigError when there is none."""
    return METHODS.get(name) or load("method.name", name, Method, METHODS)
