"""Settings of episodes and environments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field, create_model, field_validator, model_validator

from cusearch_async.algorithm.answers import Metric
from cusearch_async.config.section import Extensible, Free, Section, Shared, Sources
from cusearch_async.environments import (
    ENVIRONMENTS,
    AgentEnvironment,
    Environment,
    EnvironmentSettings,
    Reward,
    Search,
    SearchEnvironment,
    Template,
    environment_class,
    reward_function,
    template_of,
    template_text,
)
from cusearch_async.errors import ConfigError

_CHARACTERS = 16
"""Most that a token of ordinary text has."""


class EpisodeConfig(Section):
    s_max: Shared[int] = Field(5, ge=1)
    """Maximum number of tool turns of an episode, and the deepest bucket."""
    temperature: Shared[float] = Field(1.0, ge=0.01, le=2)
    """Sampling temperature of rollouts; vLLM has none below 0.01 or above 2. Evaluation is greedy by default."""
    max_prompt_tokens: Shared[int] = Field(512, ge=1)
    """Maximum length of a prompt, question included; a longer one is an error before the run starts."""
    max_turn_tokens: Shared[int] = Field(500, ge=1)
    """Maximum number of sampled tokens in a turn."""
    max_observation_tokens: Shared[int] = Field(500, ge=8)
    """Maximum length of an observation; the rest of a tool's result is cut off. An agent may send no more at once: its
    episode ends without an answer."""
    timeout_s: Free[float] = Field(600.0, gt=0)
    """An episode that takes longer, beside what the engine samples, fails, and its ticket is requeued."""

    @property
    def max_tokens(self) -> int:
        """Length of the longest possible episode, in tokens."""
        response = (self.s_max + 1) * self.max_turn_tokens + self.s_max * self.max_observation_tokens
        return self.max_prompt_tokens + response

    @property
    def max_trajectory_tokens(self) -> int:
        """The most that all rows of a trajectory can have: each has a turn at least."""
        return (self.s_max + 1) * self.max_tokens

    @property
    def max_characters(self) -> int:
        """Most characters of an episode."""
        return _CHARACTERS * self.max_tokens

    @property
    def max_observation_characters(self) -> int:
        """Characters of a tool's result that are read."""
        return _CHARACTERS * self.max_observation_tokens


class SharedEnvironmentConfig(Extensible):
    """One environment of the run, under a label that you choose."""

    name: Shared[str] = "search"
    """The environment: `search`, `agent` for a program of yours, or your own as package.module:Class."""
    share: Shared[int] = Field(1, ge=1)
    """Its share of the tickets: with shares 3 and 1, the first environment has three of four."""
    source: Sources = ()
    """Its questions, as in data.source; empty: the environment's own, else data.source."""
    template: Shared[str] = "paper"
    """The prompt: `paper`, `atlas` (the short one of the starter policies), a text with {question}, or the path of a
    file with such a text."""
    reward: Shared[str | None] = None
    """Your own reward, as package.module:function; None: the environment's."""

    @field_validator("template")
    @classmethod
    def _text(cls, template: str) -> str:
        try:
            return template_text(template)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _known(self) -> SharedEnvironmentConfig:
        try:
            self.own, self.own_reward  # noqa: B018  (they raise)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for setting in ("agent", "command", "remote"):
            if (program := getattr(self, setting, None)) and setting not in self.own_kind.model_fields:
                raise ValueError(f'{setting} = {program!r} is for name = "agent", got name = {json.dumps(self.name)}')
        return self

    @property
    def own_reward(self) -> Reward | None:
        """Raises: ConfigError when there is no such function."""
        return reward_function("reward", self.reward) if self.reward else None

    @property
    def kind(self) -> type[Environment]:
        return environment_class("name", self.name)

    @property
    def has_own_questions(self) -> bool:
        """Whether its questions come from the environment itself."""
        return not self.source and self.kind.questions() is not None

    @property
    def own_kind(self) -> type[EnvironmentSettings]:
        return self.kind.Settings

    @property
    def prompt(self) -> Template:
        return template_of(self.template)

    @property
    def scoring(self) -> Metric:
        """How answers are compared outside of the environment. One of your own that is derived from none of
        ours has no such setting, and gets SQuAD's."""
        comparing = SearchEnvironment.Settings | AgentEnvironment.Settings
        return self.own.metric if isinstance(self.own, comparing) else "squad"

    def make(self, search: Search) -> Environment:
        """The environment, with `search` as its retriever. Raises: ConfigError."""
        return self.kind(self.own, self.prompt, search, self.own_reward)


if TYPE_CHECKING:
    EnvironmentConfig = SharedEnvironmentConfig
else:
    _OWN = dict.fromkeys(found.Settings for found in ENVIRONMENTS.values())
    EnvironmentConfig = create_model("EnvironmentConfig", __base__=(*_OWN, SharedEnvironmentConfig))
