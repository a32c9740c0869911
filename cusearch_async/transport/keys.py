"""Names of all keys of a run in Redis. All share one hash tag, so one script may use all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    run: str

    @property
    def prefix(self) -> str:
        return f"cusearch:{{{self.run}}}:"

    @property
    def state(self) -> str:
        """Hash: epoch, step, version, phase, published, weights, announced_by (an epoch), checkpoint, paused,
        finished_by (an epoch), and the folder of the run (run_id, host, folder). Workers only read it."""
        return self.prefix + "state"

    @property
    def limits(self) -> str:
        """Hash: the run limits (`LIMITS_IN_REDIS`, lease_ms), written by the learner and read by all scripts. Workers
        only read it."""
        return self.prefix + "limits"

    @property
    def contract(self) -> str:
        """Hash: the run contract, key -> text, and `digest` over all of it. Workers only read it."""
        return self.prefix + "contract"

    @property
    def next_ticket(self) -> str:
        """String: the first ticket that has not been granted yet."""
        return self.prefix + "next_ticket"

    @property
    def news(self) -> str:
        """Stream with one entry, replaced whenever a worker may find something to do: weights were announced, a ticket
        was requeued, admission goes on, a learner has taken over or has
        finished the run."""
        return self.prefix + "news"

    @property
    def learner(self) -> str:
        """Hash with a time to live: the status of the learner at its last heartbeat."""
        return self.prefix + "learner"

    @property
    def learners(self) -> str:
        """Hash: nonce of a learner's start -> its epoch."""
        return self.prefix + "learners"

    @property
    def ledger(self) -> str:
        """Hash: counters of trajectories by state."""
        return self.prefix + "ledger"

    @property
    def lease(self) -> str:
        """Sorted set: open ticket -> deadline, milliseconds of the run's clock."""
        return self.prefix + "lease"

    @property
    def clock(self) -> str:
        """Hash: run, the run's clock; wall, the server's clock when it was last read. Milliseconds."""
        return self.prefix + "clock"

    @property
    def owner(self) -> str:
        """Hash: leased ticket -> worker."""
        return self.prefix + "owner"

    @property
    def requeue(self) -> str:
        """Sorted set: requeued tickets; score = ticket."""
        return self.prefix + "requeue"

    @property
    def groups(self) -> str:
        """Hash: open ticket -> trajectories finished so far."""
        return self.prefix + "groups"

    @property
    def ready(self) -> str:
        """Sorted set: tickets with a closed group; score = ticket."""
        return self.prefix + "ready"

    @property
    def memory(self) -> str:
        """String: the memory of the selection method, encoded by the method (JSON)."""
        return self.prefix + "memory"

    @property
    def sizes(self) -> str:
        """Hash: ticket -> rollouts of its group; a ticket that is not in it has G."""
        return self.prefix + "sizes"

    @property
    def workers(self) -> str:
        """Sorted set: worker -> last heartbeat, milliseconds of the server's clock."""
        return self.prefix + "workers"

    def worker(self, worker: str) -> str:
        """Hash: the status of a worker at its last heartbeat."""
        return f"{self.prefix}worker:{worker}"

    @property
    def attempts(self) -> str:
        """Hash: ticket -> failed attempts, until its group is claimed."""
        return self.prefix + "attempts"

    @property
    def incomplete(self) -> str:
        """Hash: ticket of an incomplete group -> trajectories that it lacks."""
        return self.prefix + "incomplete"

    @property
    def waiting(self) -> str:
        """Hash: buffered trajectory id -> "depth:oldest version:bytes", also when its other keys have disappeared."""
        return self.prefix + "waiting"

    @property
    def depth_by_version(self) -> str:
        """Hash: "depth:oldest version" -> buffered trajectories."""
        return self.prefix + "depth_by_version"

    @property
    def quarantine(self) -> str:
        """Hash: trajectory id -> why it is quarantined."""
        return self.prefix + "quarantine"

    @property
    def quarantine_order(self) -> str:
        """List: the trajectory ids of `quarantine`, newest first."""
        return self.prefix + "quarantine-order"

    def quarantined(self, trajectory_id: str) -> str:
        """Hash: readable fields of a quarantined trajectory."""
        return f"{self.prefix}quarantined:{trajectory_id}"

    def quarantined_payload(self, trajectory_id: str) -> str:
        """String: its payload."""
        return f"{self.prefix}quarantined-payload:{trajectory_id}"

    def depth(self, depth: int) -> str:
        """Sorted set: the bucket of one search depth; member = trajectory id, score = ticket."""
        return f"{self.prefix}depth:{depth}"

    def trajectory(self, trajectory_id: str) -> str:
        """Hash: readable fields."""
        return f"{self.prefix}traj:{trajectory_id}"

    def payload(self, trajectory_id: str) -> str:
        """String: the encoded trajectory (`codec`)."""
        return f"{self.prefix}payload:{trajectory_id}"

    def staged(self, name: str) -> str:
        """String: the payload of a put that is not finished."""
        return f"{self.prefix}staged:{name}"

    def pool(self, step: int) -> str:
        """List: the trajectory ids that learner step `step` claimed."""
        return f"{self.prefix}pool:{step}"

    def pool_info(self, step: int) -> str:
        """Hash: tickets of that pool, comma separated; size, the length of its list; trained, after the commit."""
        return f"{self.prefix}pool:{step}:facts"
