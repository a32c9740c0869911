"""The interface of the buffer for workers, learner and operators, and its records. It has two implementations: one in
Redis (`buffer.py`), and one in memory (`memory.py`), the model that the first one is tested against."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from cusearch_async.run.identity import Identity
from cusearch_async.transport.limits import LIMITS_IN_REDIS, QuestionOf
from cusearch_async.types import Pool, Trajectory

ALIVE_S = 10.0
"""A learner or worker without a heartbeat for this long counts as dead."""
AHEAD_S = 60.0
"""So does one whose last heartbeat is so far in the future: the server's clock was wrong then."""

IDLE_S = 1.0
"""Longest wait for news of the run; an expired lease, for example, is no news."""

Outcome = Literal["stored", "duplicate", "late", "full"]
"""Result of a put. stored: buffered; duplicate: another trajectory has this id; late: its group is closed or has no
such slot; full: no room now, try again."""


@dataclass(frozen=True, slots=True)
class RolloutSlot:
    """One rollout that a worker has been granted."""

    ticket: int
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run. Steps, versions and tickets count from 0."""

    epoch: int = 0
    step: int = 0
    """The next step to commit; also the version of the learner's policy."""
    fields: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the method shows to operators, like SDGA's phase."""
    published: int = -1
    """Newest announced weight version; -1 before the first."""
    weights: str = ""
    """Directory of that version in the weight store."""
    next_ticket: int = 0
    checkpoint: int = 0
    """Pools before this step are forgotten."""
    paused: bool = False
    """Whether an operator has stopped admission."""
    resumed: int = 0
    """The step from which the learner of this epoch began."""
    finished_by: int = 0
    """Epoch of the learner that saved the last step of the run; 0 before."""

    @property
    def is_finished(self) -> bool:
        """Whether the last step is saved, and no learner has taken the run over since."""
        return self.epoch > 0 and self.finished_by == self.epoch

    @property
    def exists(self) -> bool:
        """Whether a learner has ever taken this run over."""
        return self.epoch > 0


FIELDS_OF_THE_RUN = {*RunState.__dataclass_fields__, *LIMITS_IN_REDIS} | {
    "run_id",
    "host",
    "folder",
    "version",
    "announced_by",
    "pools_end",
    "method_fields",
    "lease_ms",
}
"""Names that the scripts and `state()` use in `state` and `limits`. A field of a method must not have one of them."""


class MethodState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The selection method's memory between steps. Redis and the checkpoint store it without reading it.

    Raises: ValueError for a field that is not a finite number, or has the name of a field of the run."""

    memory: str = ""
    """As text, from the method's `encode`."""
    fields: dict[str, float] = {}
    """Numbers that the method shows to operators, by name, like SDGA's global phase counter."""
    sizes: dict[int, int] = {}
    """Ticket -> rollouts of its group, for tickets that are not granted yet. Tickets that are not listed get G."""

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            if name in FIELDS_OF_THE_RUN or not name.isidentifier():
                raise ValueError(f"a method must not show a field {name!r}: the name is reserved, or not an identifier")
            if not math.isfinite(value):
                raise ValueError(f"the fields of a method must be finite, {name} is {value}")


NOTHING = MethodState()
"""The state of a method without memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every finished trajectory is. The ledger closes when `finished` is the sum of the next six counters."""

    finished: int = 0
    buffered: int = 0
    claimed: int = 0
    trained: int = 0
    unselected: int = 0
    quarantined: int = 0
    """Trajectories that must not be trained on, or that an operator has removed."""
    lost: int = 0
    """Trajectories that disappeared from Redis without an operation of ours."""
    bytes: int = 0
    """Payload bytes of the buffered trajectories."""
    requeued: int = 0
    """Tickets that were requeued because a lease expired or an episode failed."""
    incomplete_groups: int = 0
    """Groups that were closed after max_attempts without some of their trajectories."""
    failed_rollouts: int = 0
    """Trajectories that the incomplete groups lack."""
    hedged_rollouts: int = 0
    """Rollouts that were granted to a second worker (pool.hedge_after_s)."""
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
    """Closed groups of the pool that no learner has claimed yet."""
    is_claimed: bool
    """Whether a learner has claimed the pool: it trains on it, or has done so."""
    ready: int
    leased: int
    requeued: int
    incomplete: int
    """Incomplete groups among those that are ready, or in pools that Redis still keeps."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that a worker reports with every heartbeat. Counts and seconds are totals since it became ready, or
    since the task in `starting` began."""

    starting: str = ""
    """Its current task before it is ready, like `loading vLLM`; empty afterwards."""
    version: int = -1
    """Version of the loaded weights."""
    in_flight: int = 0
    """Episodes in flight."""
    episodes: int = 0
    """Episodes that were finished and buffered."""
    late_episodes: int = 0
    """Wasted episodes: another worker finished first."""
    failed_episodes: int = 0
    failed_episodes_by_kind: str = ""
    most_frequent_failure: str = ""
    """The most frequent reason, as "12 x reason"."""
    sampled_tokens: int = 0
    busy_s: float = 0.0
    """Seconds with at least one request in the engine."""
    request_s: float = 0.0
    """Seconds of all requests to the engine, together."""
    last_token_age_s: float = 0.0
    """Seconds since the engine produced a token, while it has requests."""
    alive_s: float = 0.0
    weight_loads: int = 0
    weight_load_s: float = 0.0
    searches: int = 0
    searches_shared: int = 0
    """Answered by an equal one in flight."""
    search_failures: int = 0
    search_failures_by_kind: str = ""
    search_p99_s: float = 0.0
    retriever_down_s: float = 0.0
    heartbeat_age_s: float = 0.0
    """Age of this report; only set when it is read."""

    @property
    def is_alive(self) -> bool:
        return -AHEAD_S < self.heartbeat_age_s < ALIVE_S

    def hangs(self, lease_s: float) -> bool:
        """Whether its engine has produced no token for so long that it lets its leases run out (redis.lease_s)."""
        return self.last_token_age_s > lease_s


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that the learner reports with every heartbeat."""

    epoch: int
    host: str
    pid: int
    step: int
    """The step that it waits for or trains."""
    heartbeat_age_s: float = 0.0
    """Age of this report; only set when it is read."""


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
    """Text in the question, case-insensitive."""

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
    """The result of counting the keys of a run."""

    kept: int
    """Trajectories in Redis: buffered, claimed, and in pools that are not forgotten yet."""
    findings: tuple[str, ...]
    """Differences between keys and counters, one line each."""

    @property
    def closes(self) -> bool:
        return not self.findings


class RunView(Protocol):
    """What every process can read of a run."""

    async def check_identity(self, accepts_changes: bool = False) -> bool:
        """Whether the run is that of this process; False while it has no contract, because no learner has taken it
        over, or Redis has lost it. `admit`, `put` and `heartbeat` check it too. Raises: ContractMismatch when it is
        another; a learner that `accepts_changes` may have another contract, but no other folder."""

    async def identity(self) -> Identity:
        """The run contract, and the folder of the run; NOBODY without one."""

    async def state(self) -> RunState: ...

    async def ledger(self) -> Ledger: ...

    async def server_memory(self) -> tuple[int, int]:
        """Bytes that the server uses, and the most that it may; 0 where that is not known, or not limited."""

    async def queues(self, step: int) -> Queues:
        """How many tickets are in each place, and how many groups of the pool of `step` are closed."""

    async def workers(self) -> dict[str, WorkerStatus]:
        """The last status of each worker, dead ones included."""

    async def learner(self) -> LearnerStatus | None:
        """The last status of the run's learner; None when no learner is alive."""


class WorkerBuffer(RunView, Protocol):
    """The operations of a rollout worker. Every operation is atomic and idempotent, also when it is repeated much
    later. Without contact to Redis they raise BufferUnavailable after redis.outage_s.

    A worker whose terms differ from the run contract gets no ticket and stores nothing: `admit`, `put` and `heartbeat`
    raise ContractMismatch. It can still release its tickets."""

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[RolloutSlot]:
        """Lease whole groups with up to `room` rollouts in total; empty while the staleness bound allows no ticket, or
        the run is paused. Requeued tickets come first, without the rollouts that are buffered already."""

    async def put(self, trajectory: Trajectory) -> Outcome:
        """Buffer a finished trajectory. Raises: InvalidTrajectory for one that is outside the run limits."""

    async def wait_for_news(self, longest_s: float) -> bool:
        """Wait until a worker may find something to do, but at most `longest_s`: weights were announced, a ticket was
        requeued, admission was stopped or resumed, or a learner has taken over. True when that happened, now or since
        the last call. A lease that expires is no news."""

    async def heartbeat(self, worker: str, tickets: Sequence[int], status: WorkerStatus) -> list[int]:
        """Renew the leases of `tickets`, and report the worker's status. Returns those of `tickets` whose groups are
        closed, so that a put would be late."""

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        """End the worker's leases of `tickets` and requeue them. With `failed` this counts as a failed attempt."""

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        """Release `tickets`, and remove the worker from the run."""


class LearnerBuffer(RunView, Protocol):
    """The operations of the learner, atomic and idempotent like those of workers. They raise Fenced when another
    learner has taken over, and BufferLost when Redis has lost or damaged data that it had acknowledged."""

    epoch: int
    """This learner's fencing epoch; 0 before `recover`."""
    nonce: str
    """A random name of this learner's start; empty before `recover`."""

    async def epoch_of(self, nonce: str) -> int | None:
        """The epoch that this buffer gave the learner with this nonce; None if it gave it none, or has lost it."""

    async def recover(
        self, step: int, method: MethodState = NOTHING, least_epoch: int = 0, accepts_changes: bool = False
    ) -> None:
        """Take over the run at `step`, with the method state of the checkpoint, and fence all earlier learners. Pools
        that were trained after that step will be claimed again, each by its step.

        The new fencing epoch is higher than the epoch in Redis and than `least_epoch`, the highest epoch in the run
        folder. So it never decreases, even if Redis has lost it. Delivered twice, it takes over once. From then on the
        run has this learner's limits and identity.

        Raises, before any learner is fenced: ContractMismatch when the run has another contract, unless the learner
        `accepts_changes`, and always when it belongs to another folder, or tickets were granted with another N, G or
        order; ConfigError when pools that the checkpoint needs are forgotten, or when the server may evict keys."""

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        """The pool of a step, or None while it is not complete. Claiming again gives the same pool.

        Every trajectory is checked first: payload, depth, length, vocabulary, versions, staleness (but in order
        "oldest_complete"), one question per group, and with `question_of` the right question for its ticket.
        Trajectories that fail are quarantined, and those that disappeared from Redis count as lost; their tickets are
        requeued. After max_attempts the group stays incomplete, so a pool may be empty. From a pool that was claimed
        before, trajectories that disappeared or cannot be read are left out. Raises: BufferLost for a step that is not
        the next."""

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        """Record that the pool's step has trained on `selected`, and store the method state `method`. Its group sizes
        apply to tickets that are not granted yet and have no size."""

    async def announce(self, version: int, directory: str) -> None:
        """Announce to the workers that weight version `version` is complete in `directory`."""

    async def checkpoint(self, step: int) -> None:
        """Forget the pools before `step`: every kept checkpoint contains these steps."""

    async def finish(self) -> None:
        """Record that all steps of the run are done and saved: workers and evaluator end. The next learner that takes
        over opens the run again."""

    async def learner_heartbeat(self, status: LearnerStatus) -> None:
        """Report that this learner is alive, and its status."""

    async def learner_leaves(self) -> None:
        """Report that this learner has ended."""


class OperatorBuffer(RunView, Protocol):
    """The operations of people, on a live run or not."""

    async def pause(self, paused: bool) -> None:
        """Stop or resume admission; episodes in flight continue."""

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        """Take a trajectory out of the buffer, or out of the pool that is claimed and not yet committed. True when it
        was there. If its group is not claimed yet, the rollout runs again."""

    async def reopen(self, ticket: int) -> bool:
        """Requeue a leased ticket, or a ready group that is incomplete. True when it was one of them."""

    async def capacities(self) -> list[int]:
        """Buffered trajectories per depth 0..S_max."""

    async def depth_by_version(self) -> dict[tuple[int, int], int]:
        """(depth, oldest version) -> buffered trajectories."""

    def rows(self, wanted: Filter) -> AsyncIterator[TrajectoryRow]:
        """Buffered trajectories that pass the filter, by depth, then by ticket."""

    async def fetch(self, trajectory_id: str) -> tuple[Trajectory, dict[str, str]] | None:
        """A trajectory in any state, quarantined ones included, with its readable fields; None when there is none.

        Raises: CorruptPayload."""

    async def quarantined(self) -> dict[str, str]:
        """Trajectory id -> why it is quarantined."""

    async def audit(self) -> Audit:
        """Compare the keys with the counters: every trajectory, and every ticket in exactly one place."""

    async def exists(self) -> bool:
        """Whether anything of the run is there."""

    async def runs(self) -> list[str]:
        """Names of the runs that the server has."""

    async def size(self) -> int:
        """How many keys the run has."""

    async def reset(self) -> int:
        """Delete the run; returns how many keys it had."""


class Buffer(WorkerBuffer, LearnerBuffer, OperatorBuffer, Protocol):
    """The whole interface, which a transport implements."""
