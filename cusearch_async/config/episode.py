"""How an episode is played."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cusearch_async.config.section import Section


class EpisodeConfig(Section):
    template: Literal["paper", "atlas"] = "paper"
    """The prompt, and what the environment says after a turn that neither searches nor answers. `atlas` is the
    short one that the starter policy was trained with."""
    s_max: int = Field(5, ge=1)
    """Most search turns of an episode, and the deepest bucket."""
    topk: int = Field(3, ge=1)
    """Documents per search."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampling in rollouts; 1 samples from the policy as it is. Evaluation is greedy unless told otherwise."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt, template and question together. A longer question is an error before the run starts."""
    max_turn_tokens: int = Field(500, ge=1)
    """Most tokens that the policy may write in a turn."""
    max_observation_tokens: int = Field(500, ge=8)
    """Most tokens of a search result; the rest of its documents is cut off."""
    document_template: str = "Doc {rank}(Title: {title}) {text}\n"
    """One document of a search result; {rank} counts from 1, {title} is its first line, {text} the rest."""
    timeout_s: float = Field(600.0, gt=0)
    """An episode that takes longer is given up, and its ticket is tried again."""
    format_weight: float = Field(0.2, ge=0, le=1)
    """λ_f, the weight of a valid format in the reward."""

    @property
    def max_tokens(self) -> int:
        """The longest possible episode."""
        response = (self.s_max + 1) * self.max_turn_tokens + self.s_max * self.max_observation_tokens
        return self.max_prompt_tokens + response

    @property
    def max_observation_characters(self) -> int:
        """How much of what a search finds is looked at; no token of ordinary text is longer than 16 characters."""
        return 16 * self.max_observation_tokens

    @model_validator(mode="after")
    def _known_fields(self) -> EpisodeConfig:
        try:
            self.document_template.format(rank=1, title="", text="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"document_template may use {{rank}}, {{title}} and {{text}} only: {error!r}") from error
        return self
