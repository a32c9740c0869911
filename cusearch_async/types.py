"""The main records of the project: question, trajectory, pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cusearch_async.errors import InvalidTrajectory

PAYLOAD_SCHEMA = 6
"""Version of a trajectory's payload; another one is not read."""

Singleton = Literal["raw", "zero", "pool"]
"""The advantage of a trajectory that is alone in its group: its reward, 0, or relative to its whole group."""
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How per-token losses become one number (names as in VERL)."""
RatioLevel = Literal["token", "sequence"]
"""One importance ratio per token, or one per trajectory (GSPO); for agents per row."""
Proximal = Literal["recomputed", "loglinear"]
"""How the proximal policy, the denominator of the ratio, is computed: by a forward pass before the first mini-batch, or
by interpolation between the sampling and the current policy on the log scale (without that pass)."""
Correction = Literal["tis", "icepop", "mask", "geometric", "none"]
"""How the importance weight of the sampling policy is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    id: str
    """Unique over all sources: source, split and index."""
    text: str
    answers: tuple[str, ...]
    """Gold answers; each of them is right. Empty where only a reward of the user's scores."""
    category: str
    """The group in evaluation tables: the data source, or the number of links in atlas."""
    environment: str = "search"
    """The label, in the config, of the environment of this question."""
    evidence: tuple[str, ...] | None = None
    """The passages that the answer needs, one search each; None when they are unknown."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other columns of its file: hops, type, level, what its extra_info holds. Not part of the run contract."""

    @property
    def hops(self) -> int | None:
        """Searches that the answer needs at least, if its file has them."""
        hops = self.metadata.get("hops")
        return hops if isinstance(hops, int) and not isinstance(hops, bool) else None


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of an episode's text after the prompt."""

    author: str
    """`model` for a turn of the policy; otherwise a name of the environment, like `information` (the result of a tool)
    or `notice` (a correction)."""
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What the policy was given and sampled as one text: part of the arrays of its trajectory."""

    token_ids: NDArray[np.int32]  # [L]
    sampled: NDArray[np.bool_]  # [L]
    logprobs: NDArray[np.float32]  # [S]
    versions: NDArray[np.int32]  # [S]

    @property
    def sampled_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def parts(self) -> list[NDArray[np.int32]]:
        """The token ids of prompt, turn, observation, turn and so on."""
        return np.split(self.token_ids, np.flatnonzero(np.diff(self.sampled)) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: prompt, the policy's turns and observations, concatenated.

    Two turns, one search:  prompt  model  information  model
        token_ids           P P P   a a a  i i i i      b b      [L]
        sampled             0 0 0   1 1 1  0 0 0 0      1 1      [L]
        logprobs, versions          x x x               x x      [S], one per sampled token, in order

    An agent that changes its history has several rows, each with a prompt; they lie end to end.
    """

    ticket: int
    """Number of the visit to the question; the trajectories of a ticket form a group."""
    rollout: int
    """Index within the group, from 0."""
    environment: str
    """The label of its environment."""
    question_id: str
    question: str
    answers: tuple[str, ...]
    prediction: str | None
    """The model's answer; None if it gave none."""
    token_ids: NDArray[np.int32]  # [L]
    sampled: NDArray[np.bool_]  # [L] True where the policy sampled the token
    logprobs: NDArray[np.float32]  # [S] natural log under the sampling policy, after temperature
    versions: NDArray[np.int32]  # [S] policy version (in learner steps) that sampled the token
    starts: tuple[int, ...] = (0,)
    """Where its rows begin in `token_ids`."""
    depth: int
    """cnt(τ): tool calls that the environment counted. In the search environment: searches that were executed and
    returned at least one non-blank document."""
    retrieval_tokens: int
    """|R(τ)|: sampled tokens of the turns that count in `depth`."""
    turns: int
    cut_turns: int
    """Turns that were cut off at episode.max_turn_tokens."""
    recall: float | None
    """Share of the question's evidence that it was shown; None where none is known."""
    reward: float
    em: float
    f1: float
    format_valid: bool
    worker: str
    stderr: str = ""
    """The end of what an agent's program wrote there, or of its error after the episode's limit."""
    ignored_fields: int = 0
    """Fields of an agent's requests that environment.LABEL.ignores names."""
    episode_s: float
    search_s: float
    """Seconds of `episode_s` in the environment's steps, mostly waiting for the retriever."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise InvalidTrajectory(f"trajectory {self.id}: {problem}")

    def _problem(self) -> str | None:
        """Why the record cannot be used; None if it can."""
        if self.token_ids.shape != self.sampled.shape or self.token_ids.ndim != 1:
            shapes = f"{self.token_ids.shape} and {self.sampled.shape}"
            return f"token_ids and sampled must be 1-D of one length, got {shapes}"
        count = int(self.sampled.sum())
        if self.logprobs.shape != (count,) or self.versions.shape != (count,):
            shapes = f"{self.logprobs.shape} and {self.versions.shape}"
            return f"{count} sampled tokens need as many logprobs and versions, got {shapes}"
        if not self._has_rows():
            return f"needs a prompt and at least one sampled token in each row; rows begin at {list(self.starts)}"
        if not np.isfinite(self.logprobs).all():
            place = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            return f"logprobs must be finite, sampled token {place} has {self.logprobs[place]}"
        for name in ("reward", "em", "f1", "ticket", "rollout", "depth"):
            value = getattr(self, name)
            if not np.isfinite(value) or (value < 0 and name != "reward"):
                least = "" if name == "reward" else " and >= 0"
                return f"{name} must be finite{least}, got {value}"
        return None

    def _has_rows(self) -> bool:
        edges = np.array([*self.starts, len(self.token_ids)])
        if len(self.starts) == 0 or edges[0] != 0 or (np.diff(edges) <= 0).any():
            return False
        return not self.sampled[edges[:-1]].any() and bool(np.logical_or.reduceat(self.sampled, edges[:-1]).all())

    @property
    def id(self) -> str:
        return f"{self.ticket}:{self.rollout}"

    @property
    def rows(self) -> list[Row]:
        """At least one, in order."""
        edges = [*self.starts, len(self.token_ids)]
        before = np.concatenate([[0], np.cumsum(self.sampled)])[edges].tolist()  # sampled tokens before each edge
        places = zip(itertools.pairwise(edges), itertools.pairwise(before), strict=True)
        return [
            Row(self.token_ids[a:b], self.sampled[a:b], self.logprobs[first:last], self.versions[first:last])
            for (a, b), (first, last) in places
        ]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy has sampled: those that are trained on."""
        return len(self.logprobs)

    @property
    def oldest_version(self) -> int:
        """Lowest version that sampled any token; staleness is counted from here."""
        return int(self.versions.min())


@dataclass(frozen=True, slots=True)
class Pool:
    """The input of one learner step (𝒯): N groups, ordered by (ticket, rollout). Groups may be incomplete; if no
    episode succeeded, the pool is empty."""

    step: int
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.trajectories):
            if (after.ticket, after.rollout) <= (before.ticket, before.rollout):
                raise InvalidTrajectory(
                    f"pool {self.step}: trajectories must be distinct and ordered by (ticket, rollout), "
                    f"{after.id} comes after {before.id}"
                )

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)
