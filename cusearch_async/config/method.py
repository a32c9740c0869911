"""The pool of a step, and the method that selects from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from cusearch_async.algorithm.methods import METHODS, Method, MethodSettings, method_class
from cusearch_async.config.section import Extensible, Free, Section, Shared
from cusearch_async.types import Singleton


class PoolConfig(Section):
    questions: Shared[int] = Field(64, ge=1)
    """N, groups per learner step."""
    rollouts: Shared[int] = Field(3, ge=1)
    """G, trajectories per group."""
    order: Shared[Literal["ticket", "deferred", "oldest_complete"]] = "ticket"
    """The next pool. `ticket`: the next N tickets. `deferred`: the N complete groups with the oldest tickets; a group
    may miss `defer` pools, and the next waits for it. `oldest_complete`: those N, without a bound."""
    max_staleness: Shared[int] = Field(2, ge=0)
    """Maximum number of learner steps between sampling and training; 0 is synchronous. A bound with `order = "ticket"`;
    with `deferred` max_staleness + defer is the bound, with `oldest_complete` there is none."""
    defer: Shared[int] = Field(2, ge=1)
    """Pools that a group may miss with `order = "deferred"`."""
    hedge_after_s: Free[float] = Field(0.0, ge=0)
    """After this time an idle worker also runs a ticket's missing rollouts, if its pool is near; the first to finish
    counts. Take what 99 % of the episodes need; 0: never."""
    max_attempts: Shared[int] = Field(5, ge=1)
    """Attempts at a ticket before its group stays incomplete. An attempt fails when its worker dies or an episode
    fails."""

    @property
    def size(self) -> int:
        return self.questions * self.rollouts

    @property
    def deferral(self) -> int:
        return self.defer if self.order == "deferred" else 0

    @property
    def staleness_bound(self) -> int:
        """Learner steps; only an aim with `oldest_complete`."""
        return self.max_staleness + self.deferral


class SharedMethodConfig(Extensible):
    """Settings of all selection methods; a method's own settings are in the same section."""

    name: Shared[str] = "sdga_phase"
    """The selection method: sdga_phase, sdga_auto, sdga_anti, random, topk_reward, grpo_full, grpo_half, dapo, ar3po,
    stratified_grpo, random_tokens or random_siblings, or your own as package.module:Class."""
    budget: Shared[int] = Field(96, ge=1)
    """K, trajectories trained on per step; of no effect with grpo_full, dapo, stratified_grpo and ar3po, which train on
    groups as they are."""
    singleton: Shared[Singleton] = "raw"
    """Advantage of a trajectory alone in its group: `raw`: its reward (VERL); `zero`: 0; `pool`: by mean and standard
    deviation of its whole group before the selection."""
    advantage_std: Shared[bool] = True
    """Divide advantages by the standard deviation of their group's rewards (GRPO); false only centres them (Dr.
    GRPO)."""

    @model_validator(mode="after")
    def _known(self) -> SharedMethodConfig:
        self.make()
        return self

    @property
    def own_kind(self) -> type[MethodSettings]:
        return method_class(self.name).Settings

    def make(self) -> Method[Any]:
        """The method. Raises: ConfigError for an unknown name."""
        return method_class(self.name)(self.own, self.budget)


if TYPE_CHECKING:
    MethodConfig = SharedMethodConfig
else:
    _OWN = dict.fromkeys(found.Settings for found in METHODS.values() if found.Settings is not MethodSettings)
    MethodConfig = create_model("MethodConfig", __base__=(*_OWN, SharedMethodConfig))
