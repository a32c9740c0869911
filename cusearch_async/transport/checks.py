"""Checks of a pool before a learner claims it, so that a faulty worker cannot break the staleness bound or a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cusearch_async.errors import InvalidTrajectory
from cusearch_async.transport.interface import QuestionOf
from cusearch_async.transport.limits import RunLimits
from cusearch_async.types import Trajectory


def faults(
    trajectories: Sequence[Trajectory], step: int, limits: RunLimits, question_of: QuestionOf | None
) -> dict[str, str]:
    """Trajectory id -> why it must not be trained on at `step`."""
    problems = ((t.id, _problem(t, step, limits, question_of)) for t in trajectories)
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


def _problem(t: Trajectory, step: int, limits: RunLimits, question_of: QuestionOf | None) -> str | None:
    try:
        limits.check(t)
    except InvalidTrajectory as error:
        return str(error)
    newest, staleness = int(t.versions.max()), step - t.oldest_version
    if t.oldest_version < 0 or newest > step:
        wrong = t.oldest_version if t.oldest_version < 0 else newest
        return f"sampled by version {wrong}, but the learner has versions 0 to {step}"
    if limits.order == "ticket" and staleness > limits.max_staleness:
        return f"staleness {staleness} at step {step}, pool.max_staleness is {limits.max_staleness}"
    if question_of is not None and t.question_id != question_of(t.ticket):
        return f"it answers question {t.question_id!r}, but ticket {t.ticket} is for {question_of(t.ticket)!r}"
    return None
