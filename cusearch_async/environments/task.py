"""What an agent is given, and ends with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question, and where to ask the policy."""

    question: str
    question_id: str
    base_url: str
    """Of Chat Completions and Responses, for this episode alone; without its /v1 that of Anthropic's Messages."""
    api_key: str
    model: str
    environment: str = ""
    """Its label in the config."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the row's metadata, extra_info and reward_model hold, a rubric for example, and columns like `type`
    (`data.rows.metadata_of`); no others."""
    search: Callable[[str], Awaitable[list[str]]]
    """The run's retriever: contents of the documents that it finds, best first."""
    search_url: str
    """The same over HTTP: POST {"query": …} with the key gives {"documents": […]}."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What an agent may return instead of its result alone."""

    result: str | float | None
    """Its answer, or a reward; None when it has neither."""
    stderr: str = ""
    """Its end is kept with the trajectory, for people."""
