"""Lists of buffered trajectories, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A buffered trajectory in a listing."""

    id: str
    fields: dict[str, str]
    staleness: int
    """The learner's current step minus the oldest version of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions for buffered trajectories; None for no condition."""

    depth: int | None = None
    min_staleness: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None
    """Text in the question; upper and lower case are equal."""

    def passes(self, row: TrajectoryRow) -> bool:
        reward = float(row.fields["reward"])
        return (
            (self.depth is None or int(row.fields["depth"]) == self.depth)
            and (self.min_staleness is None or row.staleness >= self.min_staleness)
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
            and (self.text is None or self.text.casefold() in row.fields["question"].casefold())
        )
