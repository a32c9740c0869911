"""Names of all keys of a run in Redis. All share one hash tag, so one script may use all of them.

Some are used by the scripts in lua/ alone. A test compares the names that these spell, and those of docs/redis.md.
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

    state = _Key("state")
    """Hash: epoch, step, version, phase, published, weights, announced_by (an epoch), checkpoint, paused,
    finished_by (an epoch), and the folder of the run (run_id, host, folder). Workers only read it."""
    limits = _Key("limits")
    """Hash: the run limits (`LIMITS_IN_REDIS`, lease_ms), written by the learner and read by all scripts. Workers
    only read it."""
    contract = _Key("contract")
    """Hash: the run contract, key -> text, and `digest` over all of it. Workers only read it."""
    next_ticket = _Key("next_ticket")
    """String: the first ticket that has not been granted yet."""
    news = _Key("news")
    """Stream with one entry, replaced whenever a worker may find something to do: weights were announced, a ticket
    was requeued, admission goes on, a learner has taken over or has finished the run."""
    learner = _Key("learner")
    """Hash with a time to live: the status of the learner at its last heartbeat."""
    learners = _Key("learners")
    """Hash: nonce of a learner's start -> its epoch."""
    ledger = _Key("ledger")
    """Hash: counters of trajectories by state."""
    lease = _Key("lease")
    """Sorted set: open ticket -> deadline, milliseconds of the run's clock."""
    clock = _Key("clock")
    """Hash: run, the run's clock; wall, the server's clock when it was last read. Milliseconds."""
    owner = _Key("owner")
    """Hash: leased ticket -> worker."""
    requeue = _Key("requeue")
    """Sorted set: requeued tickets; score = ticket."""
    groups = _Key("groups")
    """Hash: open ticket -> trajectories finished so far."""
    ready = _Key("ready")
    """Sorted set: tickets with a closed group; score = ticket."""
    memory = _Key("memory")
    """String: the memory of the selection method, encoded by the method (JSON)."""
    sizes = _Key("sizes")
    """Hash: ticket -> rollouts of its group; a ticket that is not in it has G."""
    workers = _Key("workers")
    """Sorted set: worker -> last heartbeat, milliseconds of the server's clock."""
    worker = _KeyOf("worker:{}")
    """Hash: the status of a worker at its last heartbeat."""
    attempts = _Key("attempts")
    """Hash: ticket -> failed attempts, until its group is claimed."""
    incomplete = _Key("incomplete")
    """Hash: ticket of an incomplete group -> trajectories that it lacks."""
    waiting = _Key("waiting")
    """Hash: buffered trajectory id -> "depth:oldest version:bytes", also when its other keys have disappeared."""
    depth_by_version = _Key("depth_by_version")
    """Hash: "depth:oldest version" -> buffered trajectories."""
    quarantine = _Key("quarantine")
    """Hash: trajectory id -> why it is quarantined."""
    quarantine_order = _Key("quarantine-order")
    """List: the trajectory ids of `quarantine`, newest first."""
    quarantined = _KeyOf("quarantined:{}")
    """Hash: readable fields of a quarantined trajectory."""
    quarantined_payload = _KeyOf("quarantined-payload:{}")
    """String: its payload."""
    depth = _KeyOf("depth:{}")
    """Sorted set: the bucket of one search depth; member = trajectory id, score = ticket."""
    trajectory = _KeyOf("traj:{}")
    """Hash: readable fields."""
    payload = _KeyOf("payload:{}")
    """String: the encoded trajectory (`codec`)."""
    staged = _KeyOf("staged:{}")
    """String: the payload of a put that is not finished."""
    pool = _KeyOf("pool:{}")
    """List: the trajectory ids that learner step `step` claimed."""
    pool_info = _KeyOf("pool:{}:facts")
    """Hash: tickets of that pool, comma separated; size, the length of its list; trained, after the commit."""
