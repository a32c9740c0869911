"""The pool of a step, and the method that selects from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from cusearch_async.algorithm.methods import METHODS, Method, MethodSettings, method_class
from cusearch_async.config.section import Extensible, Section
from cusearch_async.types import Singleton


class PoolConfig(Section):
    questions: int = Field(64, ge=1)
    """N, groups per learner step."""
    rollouts: int = Field(3, ge=1)
    """G, trajectories per group."""
    order: Literal["ticket", "oldest_complete"] = "ticket"
    """Which groups make the next pool: those of the next N tickets, in their order (`ticket`), or the N complete
    groups with the oldest tickets, whichever are complete (`oldest_complete`)."""
    max_staleness: int = Field(2, ge=0)
    """Learner steps a trajectory may lag behind the policy that trains on it; 0 is the synchronous algorithm."""
    max_attempts: int = Field(5, ge=1)
    """Times that a ticket is tried (its worker dies, its episode takes too long) before its group is left
    incomplete."""

    @property
    def size(self) -> int:
        return self.questions * self.rollouts


class SharedMethodConfig(Extensible):
    """What all selection methods have; a method's own settings stand beside them."""

    name: str = "sdga_phase"
    """How a step's trajectories are chosen: sdga_phase, sdga_auto, sdga_anti, random, topk_reward, grpo_full,
    grpo_half, dapo or ar3po, or a method of your own as package.module:Class."""
    budget: int = Field(96, ge=1)
    """K, trajectories trained on per step."""
    singleton: Singleton = "raw"
    """Advantage of a trajectory that is alone in its group: `raw` its reward (VERL), `zero` none, `pool` by the
    mean and spread of its whole group before the selection."""
    advantage_std: bool = True
    """Divide advantages by the standard deviation of their group's rewards (GRPO); false only centres them (Dr. GRPO).
    """

    @model_validator(mode="after")
    def _known(self) -> SharedMethodConfig:
        self.make()
        return self

    @property
    def own_kind(self) -> type[MethodSettings]:
        return method_class(self.name).Settings

    def make(self) -> Method[Any]:
        """The method. Raises: ConfigError when there is none of this name."""
        return method_class(self.name)(self.own, self.budget)


if TYPE_CHECKING:
    MethodConfig = SharedMethodConfig
else:
    _OWN = dict.fromkeys(found.Settings for found in METHODS.values() if found.Settings is not MethodSettings)
    MethodConfig = create_model("MethodConfig", __base__=(*_OWN, SharedMethodConfig))
