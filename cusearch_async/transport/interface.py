"""What a buffer does for workers, learner and operators, and the records that go in and out. There are two of them: one
in Redis (`buffer.py`), one in memory (`memory.py`, the model that the first is tested against)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from cusearch_async.transport.limits import LIMITS_IN_REDIS
from cusearch_async.transport.origin import Origin
from cusearch_async.transport.run_contract import RunContract
from cusearch_async.types import Pool, Trajectory

ALIVE_S = 10.0
"""A learner or a worker that has said nothing for so long counts as gone."""

QuestionOf = Callable[[int], str]
"""The id of the question that a ticket visits."""
Outcome = Literal["stored", "duplicate", "late", "full"]
"""Of a put: kept; another is there already; its group is closed or has no such slot; no room now, try again."""


@dataclass(frozen=True, slots=True)
class RolloutSlot:
    """One rollout that a worker has been granted."""

    ticket: int
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands. Steps, versions and tickets count from 0."""

    epoch: int = 0
    step: int = 0
    """The next step to commit; also the version of the learner's policy."""
    fields: Mapping[str, float] = field(default_factory=dict)
    """What the method wants seen, like SDGA's phase."""
    published: int = -1
    """Newest announced weight version; -1 before the first."""
    weights: str = ""
    """Its directory in the weight store."""
    next_ticket: int = 0
    checkpoint: int = 0
    """Pools before this step are forgotten."""
    paused: bool = False
    """Whether an operator has stopped admission."""
    origin: Origin | None = None
    """Whose run it is; None where no learner has said so."""

    @property
    def exists(self) -> bool:
        """Whether a learner has ever taken this run over."""
        return self.epoch > 0


FIELDS_OF_THE_RUN = {*RunState.__dataclass_fields__, *Origin.__dataclass_fields__, *LIMITS_IN_REDIS} | {
    "version",
    "announced_by",
    "method_fields",
    "lease_ms",
}
"""What scripts read of `state` and `limits`, and what reading `state` takes for one of these: no field of a method."""


class MethodState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the selection method leaves to coming steps. Redis and the checkpoint keep it, and know nothing of it.

    Raises: ValueError for a field that is no finite number, or would take the place of one of the run's own."""

    memory: str = ""
    """The method's memory, as its `encode` makes text of it."""
    fields: dict[str, float] = {}
    """Numbers that the method wants seen, by name: SDGA's global phase counter is one."""
    sizes: dict[int, int] = {}
    """Ticket -> rollouts of its group, for coming tickets that are to get another number than G, or G surely."""

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            if name in FIELDS_OF_THE_RUN or not name.isidentifier():
                raise ValueError(f"a method must not show a field {name!r}: the run's state has one, or it is no name")
            if not math.isfinite(value):
                raise ValueError(f"what a method shows must be finite, {name} is {value}")


NOTHING = MethodState()
"""Of a method that remembers nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every finished trajectory is. It closes: finished = the sum of the next six."""

    finished: int = 0
    buffered: int = 0
    claimed: int = 0
    trained: int = 0
    unselected: int = 0
    quarantined: int = 0
    """What must not be trained on, or what an operator has taken out."""
    lost: int = 0
    """What has gone from Redis without our doing."""
    bytes: int = 0
    """Payload bytes of what is buffered."""
    requeued: int = 0
    """Tickets that went to another worker because a lease ran out or an episode failed."""
    incomplete_groups: int = 0
    """Groups that were closed without some of their trajectories, after max_attempts."""
    failed_rollouts: int = 0
    """What they lack."""
    duplicates_refused: int = 0
    late_refused: int = 0

    @property
    def closes(self) -> bool:
        taken = self.claimed + self.trained + self.unselected
        return self.finished == self.buffered + taken + self.quarantined + self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Tickets by where they are."""

    ready_of_pool: int
    """Groups of the pool that is waited for which are finished."""
    ready: int
    leased: int
    requeued: int
    incomplete: int
    """Of the groups that are ready or kept, those that lack trajectories."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker fares, as it says itself with every heartbeat; counts and seconds since it became ready."""

    version: int = -1
    """Of the loaded weights."""
    in_flight: int = 0
    """Episodes at play."""
    episodes: int = 0
    """Played and stored."""
    failed_episodes: int = 0
    failed_episodes_by_kind: str = ""
    sampled_tokens: int = 0
    busy_s: float = 0.0
    """With a request in the engine."""
    last_token_age_s: float = 0.0
    """For how long the engine has owed a token."""
    alive_s: float = 0.0
    weight_loads: int = 0
    weight_load_s: float = 0.0
    searches: int = 0
    searches_shared: int = 0
    search_failures: int = 0
    search_failures_by_kind: str = ""
    search_p50_s: float = 0.0
    search_p99_s: float = 0.0
    retriever_down_s: float = 0.0
    heartbeat_age_s: float = 0.0
    """Since it said all this; only known of another's."""

    @property
    def is_alive(self) -> bool:
        return self.heartbeat_age_s < ALIVE_S


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run's learner is, as it says itself with every heartbeat."""

    epoch: int
    host: str
    pid: int
    step: int
    """The step it is at."""
    heartbeat_age_s: float = 0.0
    """Since it said all this; only known of another's."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A trajectory in short."""

    id: str
    fields: dict[str, str]
    staleness: int
    """Learner's step minus its oldest version, now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which buffered trajectories to look at; None asks for nothing."""

    depth: int | None = None
    min_staleness: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None
    """In the question, upper and lower case alike."""

    def passes(self, row: TrajectoryRow) -> bool:
        reward = float(row.fields["reward"])
        return (
            (self.depth is None or int(row.fields["depth"]) == self.depth)
            and (self.min_staleness is None or row.staleness >= self.min_staleness)
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
            and (self.text is None or self.text.casefold() in row.fields["question"].casefold())
        )


@dataclass(frozen=True, slots=True)
class Audit:
    """What counting the keys of a run has found."""

    kept: int
    """Trajectories that Redis keeps: buffered, claimed, and of the pools that are not forgotten yet."""
    findings: tuple[str, ...]
    """What does not add up, one line each."""

    @property
    def closes(self) -> bool:
        return not self.findings


class WorkerBuffer(Protocol):
    """What a rollout worker does with the buffer of a run. Every operation happens wholly or not at all, and repeating
    one, even later, does no harm. Lost contact raises BufferUnavailable after redis.outage_s.

    A worker with another contract than the run's gets no ticket and stores nothing: `admit`, `put` and `heartbeat`
    raise ContractMismatch. It can give its tickets back."""

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[RolloutSlot]:
        """Lease whole groups of up to `room` rollouts in all; empty while the staleness bound leaves none, or while
        the run is paused. Requeued tickets come first, without the rollouts that are in the buffer already."""
        ...

    async def put(self, trajectory: Trajectory) -> Outcome:
        """Keep a finished trajectory. Raises: InvalidTrajectory for one that this run cannot have made."""
        ...

    async def heartbeat(self, worker: str, tickets: Sequence[int], status: WorkerStatus) -> None:
        """Renew the leases of `tickets` and say how the worker fares."""
        ...

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        """End the worker's leases of `tickets`: others play what is missing. `failed` counts as an attempt."""
        ...

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        """Release `tickets` and be no worker of the run any more."""
        ...

    async def check_contract(self) -> bool:
        """Whether the run has this process's contract; False while it has none, because no learner of this version has
        taken it over. `admit`, `put` and `heartbeat` check it too. Raises: ContractMismatch for another one."""
        ...

    async def state(self) -> RunState: ...


class LearnerBuffer(Protocol):
    """What a learner does with the buffer. As for workers; and a replaced learner meets Fenced, one whose server has
    lost or spoiled what it had acknowledged BufferLost."""

    @property
    def epoch(self) -> int:
        """This learner's fencing epoch; 0 before `recover`."""
        ...

    async def recover(
        self,
        step: int,
        method: MethodState = NOTHING,
        least_epoch: int = 0,
        origin: Origin | None = None,
        accepts_changes: bool = False,
    ) -> None:
        """Take over the run at `step`, with what the method remembered at the checkpoint; earlier learners are
        fenced off. Pools trained after that step are claimed again, each by its step.

        The new epoch is above Redis' own and above `least_epoch`, the highest that the run folder knows of, so it
        never goes back though Redis may have forgotten it. Delivered twice, it takes over once. From then on the run
        is that of `origin`, if one is given, and it has this learner's limits and contract.

        Raises, before it fences anybody off: ContractMismatch when the run has another contract, unless the learner
        `accepts_changes`, and in any case when tickets were granted with another N, G or order; ConfigError when the
        run is another's already, when pools that the checkpoint needs are forgotten, or when the server may evict
        keys."""
        ...

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        """The pool of a step, or None while it is not complete; asking again gives the same pool.

        Every trajectory is checked first: payload, depth, length, vocabulary, versions, staleness (order "ticket"), one
        question per group, and with `question_of` the right one for its ticket. What fails is quarantined, what has
        gone from the buffer is counted as lost, and their tickets are played again; after max_attempts the group stays
        incomplete. So a pool may be empty. Of a pool that was taken before, what has gone or cannot be read any more
        is left out. Raises: BufferLost for a step that is not the next."""
        ...

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        """The pool's step has trained on `selected` of it, and the method remembers `method`. Its group sizes hold for
        coming tickets that have none yet."""
        ...

    async def announce(self, version: int, directory: str) -> None:
        """Tell the workers that weight version `version` is complete in `directory`."""
        ...

    async def checkpoint(self, step: int) -> None:
        """All steps before `step` are safe in every kept checkpoint: forget their pools."""
        ...

    def follow_epoch(self, epoch: int) -> None:
        """Speak for the learner that has taken the run over as `epoch` on another connection."""
        ...

    async def learner_heartbeat(self, status: LearnerStatus) -> None:
        """Say that this learner lives, and where."""
        ...

    async def learner_leaves(self) -> None:
        """Say that it has ended."""
        ...

    async def check_contract(self) -> bool: ...

    async def state(self) -> RunState: ...

    async def ledger(self) -> Ledger: ...

    async def queues(self, step: int) -> Queues:
        """Where the open tickets are, and how far the pool of `step` has come."""
        ...

    async def workers(self) -> dict[str, WorkerStatus]:
        """What each worker said at its last heartbeat, also of those that are gone."""
        ...

    async def learner(self) -> LearnerStatus | None:
        """What the run's learner said at its last heartbeat; None when none is alive."""
        ...


class OperatorBuffer(Protocol):
    """What people do with the buffer of a run, whoever else works on it."""

    async def pause(self, paused: bool) -> None:
        """Stop or resume admission; episodes in flight go on."""
        ...

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        """Take a trajectory out of the buffer, or out of the pool that is claimed and not yet committed; whether it was
        there. A group that no learner has claimed plays it again."""
        ...

    async def reopen(self, ticket: int) -> bool:
        """Put a leased ticket, or a waiting group that is incomplete, back in the queue; whether it was one."""
        ...

    async def state(self) -> RunState: ...

    async def ledger(self) -> Ledger: ...

    async def queues(self, step: int) -> Queues: ...

    async def workers(self) -> dict[str, WorkerStatus]: ...

    async def learner(self) -> LearnerStatus | None: ...

    async def contract(self) -> RunContract:
        """What the processes of the run agree on; without terms where no learner has written one."""
        ...

    async def capacities(self) -> list[int]:
        """Buffered trajectories per depth 0..S_max."""
        ...

    async def depth_by_version(self) -> dict[tuple[int, int], int]:
        """(depth, oldest version) -> buffered trajectories."""
        ...

    def rows(self, wanted: Filter) -> AsyncIterator[TrajectoryRow]:
        """Buffered trajectories that pass the filter, by depth, then by ticket."""
        ...

    async def fetch(self, trajectory_id: str) -> tuple[Trajectory, dict[str, str]] | None:
        """A trajectory wherever it is, quarantine included, with its readable fields; None when there is none.

        Raises: CorruptPayload."""
        ...

    async def quarantined(self) -> dict[str, str]:
        """Trajectory id -> why it was taken out."""
        ...

    async def audit(self) -> Audit:
        """Count what is kept against the counters: every trajectory, and every ticket in exactly one place."""
        ...

    async def exists(self) -> bool:
        """Whether anything of the run is there."""
        ...

    async def runs(self) -> list[str]:
        """Names of the runs that the server has."""
        ...

    async def size(self) -> int:
        """How many keys the run has."""
        ...

    async def reset(self) -> int:
        """Forget the run; returns how many keys it had."""
        ...


class Buffer(WorkerBuffer, LearnerBuffer, OperatorBuffer, Protocol):
    """All of it: what a transport has to offer."""
