"""What a server would hold of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cusearch_async.transport.interface import RunState, WorkerStatus
from cusearch_async.transport.limits import RunLimits
from cusearch_async.types import Trajectory


@dataclass(slots=True)
class Entry:
    trajectory: Trajectory
    state: str
    size: int
    has_gone: bool = False
    """From the server, without anybody's doing."""


@dataclass(slots=True)
class Claimed:
    """A pool that a step has taken."""

    tickets: list[int]
    ids: list[str]
    trained: int | None = None
    """How many of them, once it is committed."""


@dataclass(slots=True)
class MemoryRun:
    """What the server would hold of a run."""

    now: float = 0.0
    limits: RunLimits | None = None
    """As the learner has laid it down."""
    state: RunState = field(default_factory=RunState)
    announced_by: int = 0
    memory: str = ""
    """The method's."""
    entries: dict[str, Entry] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    pools: dict[int, Claimed] = field(default_factory=dict)
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    requeue: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    groups: dict[int, int] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    incomplete: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    workers: dict[str, tuple[WorkerStatus, float]] = field(default_factory=dict)
    """What each said, and when."""
    learner: tuple[dict[str, str], float] = ({}, 0.0)
    """What it said, and until when that holds."""
