"""The run limits: sizes, staleness, attempts, room; and the checks of a pool against them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from cusearch_async.config import Config
from cusearch_async.errors import InvalidTrajectory
from cusearch_async.types import Trajectory

QuestionOf = Callable[[int], str]
"""The id of the question of a ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The run limits. Those of the learner are in Redis and apply to all processes (`LIMITS_IN_REDIS`)."""

    questions: int
    """N, groups per pool."""
    rollouts: int
    """G, trajectories per group; a method may give single groups another size when it commits."""
    max_staleness: int
    steps: int
    """Pools of the run. In ticket order no ticket is granted that belongs to none of them."""
    order: str
    defer: int = 0
    """Pools that a group may miss; 0 in any order but `deferred`."""
    hedge_s: float = 0.0
    """Seconds after which another worker may run what a leased ticket lacks; 0: never."""
    s_max: int
    lease_s: float
    max_attempts: int
    """Attempts at a ticket before its group is closed incomplete."""
    limit: int
    """Maximum number of buffered trajectories. The pool that the learner waits for may exceed it."""
    limit_bytes: int
    """Maximum number of buffered payload bytes. The pool that the learner waits for may exceed it."""
    max_tokens: int
    """Longest possible row of a trajectory."""
    vocab_size: int | None = None
    """Token ids are below this; None when the model's config has not been read."""

    @property
    def max_trajectory_tokens(self) -> int:
        return (self.s_max + 1) * self.max_tokens

    def due(self, step: int) -> tuple[int, int]:
        """First and last ticket of the pool that must be trained at `step` at the latest."""
        first = (step - self.defer) * self.questions
        return first, first + self.questions - 1

    def ready_of_pool(self, step: int, ready: int, due: int) -> int:
        """Groups that `step` could take, of `ready` groups in all and `due` ready or taken ones among the due."""
        waits_for_due = self.order != "oldest_complete" and self.due(step)[0] >= 0
        return min(ready, self.questions, *([due] if waits_for_due else []))

    def check(self, trajectory: Trajectory) -> None:
        """Raises: InvalidTrajectory that names the value outside the limits."""
        for name, value, most in (
            ("depth", trajectory.depth, self.s_max),
            ("rows", len(trajectory.starts), self.s_max + 1),
            ("a row's token_ids", max(len(row.token_ids) for row in trajectory.rows), self.max_tokens),
        ):
            if value > most:
                raise InvalidTrajectory(f"trajectory {trajectory.id}: {name} must be at most {most}, got {value}")
        lowest, highest = int(trajectory.token_ids.min()), int(trajectory.token_ids.max())
        if lowest < 0 or (self.vocab_size is not None and highest >= self.vocab_size):
            below = "" if self.vocab_size is None else f" and below {self.vocab_size} (the model's vocabulary)"
            wrong = lowest if lowest < 0 else highest
            raise InvalidTrajectory(f"trajectory {trajectory.id}: token ids must be at least 0{below}, got {wrong}")

    def faults(
        self, trajectories: Sequence[Trajectory], step: int, question_of: QuestionOf | None = None
    ) -> dict[str, str]:
        """Trajectory id -> why it must not be trained on at `step`, so that a faulty worker cannot break the staleness
        bound or a group."""
        problems = ((t.id, self._problem(t, step, question_of)) for t in trajectories)
        found = {id_: problem for id_, problem in problems if problem}
        questions: dict[int, set[str]] = defaultdict(set)
        for t in trajectories:
            if t.id not in found:
                questions[t.ticket].add(t.question_id)
        for t in trajectories:
            if len(questions[t.ticket]) > 1:
                several = ", ".join(sorted(questions[t.ticket]))
                found.setdefault(t.id, f"the trajectories of its group answer different questions: {several}")
        return found

    def _problem(self, t: Trajectory, step: int, question_of: QuestionOf | None) -> str | None:
        try:
            self.check(t)
        except InvalidTrajectory as error:
            return str(error)
        newest, staleness = int(t.versions.max()), step - t.oldest_version
        if t.oldest_version < 0 or newest > step:
            wrong = t.oldest_version if t.oldest_version < 0 else newest
            return f"sampled by version {wrong}, but the learner has versions 0 to {step}"
        if self.order != "oldest_complete" and staleness > self.max_staleness + self.defer:
            deferred = f", pool.defer {self.defer}" if self.defer else ""
            return f"staleness {staleness} at step {step}, pool.max_staleness is {self.max_staleness}{deferred}"
        if question_of is not None and t.question_id != question_of(t.ticket):
            return f"it answers question {t.question_id!r}, but ticket {t.ticket} is for {question_of(t.ticket)!r}"
        return None


LIMITS_IN_REDIS = [
    field.name for field in fields(RunLimits) if field.name not in ("lease_s", "max_tokens", "vocab_size")
]
"""The run limits that the learner writes into Redis for all processes; also lease_s, as `lease_ms`."""


def limits_of(config: Config, vocab_size: int | None = None) -> RunLimits:
    return RunLimits(
        questions=config.questions_per_step,
        rollouts=config.pool.rollouts,
        max_staleness=config.pool.max_staleness,
        steps=config.run.steps,
        order=config.pool.order,
        defer=config.pool.deferral,
        hedge_s=config.pool.hedge_after_s,
        s_max=config.episode.s_max,
        lease_s=config.redis.lease_s,
        max_attempts=config.pool.max_attempts,
        limit=config.buffer_limit,
        limit_bytes=config.redis.max_mib * 2**20,
        max_tokens=config.episode.max_tokens,
        vocab_size=vocab_size,
    )
