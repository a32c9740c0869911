"""Names of all keys of a run in Redis. All share one hash tag, so one script may use all of them.

Some are used by the scripts in lua/ alone. A test compares the names that these spell, and those of docs/redis.md,
which describes each. Workers only read `state`, `limits` and `contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Key:
    name: str

    def __get__(self, keys: Keys, _: type[Keys]) -> str:
        return keys.prefix + self.name


@dataclass(frozen=True, slots=True)
class _KeyOf:
    name: str
    """With {} for the step, depth, worker, … that the key is of."""

    def __get__(self, keys: Keys, _: type[Keys]) -> Callable[[object], str]:
        return lambda of: keys.prefix + self.name.format(of)


@dataclass(frozen=True, slots=True)
class Keys:
    run: str

    @property
    def prefix(self) -> str:
        return f"cusearch:{{{self.run}}}:"

    state = _Key("state")  # hash: epoch, step, version, published, weights, checkpoint, paused, run_id, folder, …
    limits = _Key("limits")  # hash: the run limits (`LIMITS_IN_REDIS`, lease_ms), written by the learner
    contract = _Key("contract")  # hash: the run contract, key -> text, and `digest` over all of it
    next_ticket = _Key("next_ticket")  # string: the first ticket that has not been granted yet
    news = _Key("news")  # stream with one entry, replaced whenever a worker may find something to do
    learner = _Key("learner")  # hash with a time to live: the status of the learner at its last heartbeat
    learners = _Key("learners")  # hash: nonce of a learner's start -> its epoch
    ledger = _Key("ledger")  # hash: counters of trajectories by state
    lease = _Key("lease")  # sorted set: open ticket -> deadline, milliseconds of the run's clock
    clock = _Key("clock")  # hash: run, the run's clock; wall, the server's at that time; milliseconds
    owner = _Key("owner")  # hash: leased ticket -> worker
    leased_at = _Key("leased_at")  # sorted set: leased ticket -> when it was granted last, ms of the run's clock
    hedged = _Key("hedged")  # hash: leased ticket -> the last other worker that runs it (pool.hedge_after_s)
    requeue = _Key("requeue")  # sorted set: requeued tickets; score = ticket
    groups = _Key("groups")  # hash: open ticket -> trajectories finished so far
    ready = _Key("ready")  # sorted set: tickets with a closed group; score = ticket
    taken = _Key("taken")  # sorted set: tickets that steps have claimed, in deferred order; score = ticket
    reserved = _Key("reserved")  # hash: step -> tickets of its pool, which are generated again for it; deferred order
    memory = _Key("memory")  # string: the memory of the selection method, encoded by the method (JSON)
    sizes = _Key("sizes")  # hash: ticket -> rollouts of its group; a ticket that is not in it has G
    workers = _Key("workers")  # sorted set: worker -> last heartbeat, milliseconds of the server's clock
    worker = _KeyOf("worker:{}")  # hash: the status of a worker at its last heartbeat
    attempts = _Key("attempts")  # hash: ticket -> failed attempts, until its group is claimed
    incomplete = _Key("incomplete")  # hash: ticket of an incomplete group -> trajectories that it lacks
    waiting = _Key("waiting")  # hash: buffered id -> "depth:oldest version:bytes", also when its other keys are gone
    depth_by_version = _Key("depth_by_version")  # hash: "depth:oldest version" -> buffered trajectories
    quarantine = _Key("quarantine")  # hash: trajectory id -> why it is quarantined
    quarantine_order = _Key("quarantine-order")  # list: the trajectory ids of `quarantine`, newest first
    quarantined = _KeyOf("quarantined:{}")  # hash: readable fields of a quarantined trajectory
    quarantined_payload = _KeyOf("quarantined-payload:{}")  # string: its payload
    answered = _KeyOf("answered:{}")  # string with a time to live: the answer to the quarantine or requeue of this name
    depth = _KeyOf("depth:{}")  # sorted set: the bucket of one depth; member = trajectory id, score = ticket
    trajectory = _KeyOf("traj:{}")  # hash: readable fields
    payload = _KeyOf("payload:{}")  # string: the encoded trajectory (`codec`)
    staged = _KeyOf("staged:{}")  # string: the payload of a put that is not finished
    pool = _KeyOf("pool:{}")  # list: the trajectory ids that learner step `step` claimed
    pool_info = _KeyOf("pool:{}:facts")  # hash: tickets of that pool; size of its list; trained, after the commit
