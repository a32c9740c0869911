"""The metrics of a learner step: its pool, its selection, the buffer, its timing and the workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods.sdga import count_depths
from cusearch_async.metrics.table import Metrics
from cusearch_async.transport.interface import Ledger, WorkerStatus
from cusearch_async.types import Pool, Trajectory

_LEDGER = (
    "buffered",
    "bytes",
    "requeued",
    "incomplete_groups",
    "failed_rollouts",
    "quarantined",
    "lost",
    "late_refused",
)
_TOTALS = (
    "sampled_tokens",
    "busy_s",
    "request_s",
    "alive_s",
    "weight_load_s",
    "searches",
    "search_failures",
    "late_episodes",
)


def describe_step(
    pool: Pool, selected: Sequence[Trajectory], advantages: Advantages, budget: int, s_max: int
) -> Metrics:
    """Rewards, depths, staleness, group and selection figures of one step; without means of the selected ones where
    nothing was, and without recall where no evidence is known."""
    everyone = list(pool)
    staleness = np.array([max(0, pool.step - t.oldest_version) for t in everyone])
    depths = np.array([t.depth for t in everyone])
    retrieval = np.array([t.retrieval_tokens for t in everyone])
    best = np.sort(retrieval)[::-1][: len(selected)].sum()
    covered = sum(t.retrieval_tokens for t in selected)
    recall = [t.recall for t in everyone if t.recall is not None]
    of_some: Metrics = {"episode/recall": _mean(recall)} if recall else {}
    if searched := [t.recall for t in everyone if t.recall is not None and t.depth > 0]:
        of_some["episode/recall_of_searched"] = _mean(searched)
    observed = [_observations(t) for t in everyone]
    repeated = sum(len(shown) - len(set(shown)) for shown in observed)
    compared = [t for t in everyone if t.answers]
    right = [t.reward for t in compared if t.em == 1 and t.prediction is not None]  # not by its reward, as an agent's
    wrong = [t.reward for t in compared if t.em != 1]
    if right and wrong:
        of_some["reward/right_minus_wrong"] = _mean(right) - _mean(wrong)
    if selected:
        of_some["reward/trained"] = _mean(t.reward for t in selected)
        of_some["depth/mean_trained"] = _mean(t.depth for t in selected)
    return of_some | {
        "reward/all": _mean(t.reward for t in everyone),
        "reward/em": _mean(t.em for t in everyone),
        "reward/f1": _mean(t.f1 for t in everyone),
        "reward/format_valid": _mean(t.format_valid for t in everyone),
        "reward/answered": _mean(t.prediction is not None for t in everyone),
        "reward/compared": _mean(bool(t.answers) for t in everyone),
        "depth/mean": _mean(t.depth for t in everyone),
        "depth/generated": _histogram(everyone, s_max),
        "depth/selected": _histogram(selected, s_max),
        "selection/budget_filled": len(selected) / budget,
        "selection/usable_share": advantages.usable_share,
        "selection/singleton_mass": _singleton_mass(selected, advantages),
        "selection/coverage": float(covered),
        "selection/coverage_of_best": float(covered / best) if best else 1.0,
        "groups/singleton_share": advantages.singleton_share,
        "groups/zero_variance_share": advantages.zero_variance_share,
        **_outcomes(everyone),
        "staleness/min": float(staleness.min()) if everyone else 0.0,
        "staleness/mean": _mean(staleness),
        "staleness/max": float(staleness.max(initial=0)),
        "by_depth/staleness": _by_depth(staleness, depths, s_max),
        "by_depth/reward": _by_depth(np.array([t.reward for t in everyone]), depths, s_max),
        "by_depth/em": _by_depth(np.array([t.em for t in everyone]), depths, s_max),
        "episode/rows": _mean(len(t.starts) for t in everyone),
        "episode/turns": _mean(t.turns for t in everyone),
        "episode/ignored_fields": _mean(t.ignored_fields for t in everyone),
        "episode/cut_turns": sum(t.cut_turns for t in everyone) / max(1, sum(t.turns for t in everyone)),
        "episode/repeated_observations": repeated / max(1, sum(map(len, observed))),
        "episode/sampled_tokens": _mean(t.sampled_tokens for t in everyone),
        "episode/seconds_mean": _mean(t.episode_s for t in everyone),
        "episode/seconds_p99": float(np.quantile([t.episode_s for t in everyone], 0.99)) if everyone else 0.0,
        "episode/search_seconds_mean": _mean(t.search_s for t in everyone),
    }


def _observations(trajectory: Trajectory) -> list[bytes]:
    """The tokens that the environment answered with, turn by turn."""
    return [tokens.tobytes() for row in trajectory.rows for tokens in row.parts[2::2]]


def describe_environments(pool: Pool, selected: Sequence[Trajectory], labels: Sequence[str]) -> Metrics:
    """Of each environment of the run; nothing where there is only one."""
    found: Metrics = {}
    for label in labels if len(labels) > 1 else ():
        own = [t for t in pool if t.environment == label]
        trained = sum(t.environment == label for t in selected)
        found |= {
            f"environment/{label}/share": len(own) / max(len(pool), 1),
            f"environment/{label}/reward": _mean(t.reward for t in own),
            f"environment/{label}/em": _mean(t.em for t in own),
            f"environment/{label}/depth": _mean(t.depth for t in own),
            f"environment/{label}/trained_share": trained / max(len(own), 1),
        }
    return found


def describe_ledger(ledger: Ledger) -> Metrics:
    return {f"buffer/{name}": float(getattr(ledger, name)) for name in _LEDGER}


def describe_server(used: int, limit: int, seconds: float) -> Metrics:
    """`limit` 0: none. `seconds` is of one request."""
    found: Metrics = {"buffer/server_bytes": float(used), "buffer/latency_s": seconds}
    return found | ({"buffer/server_share": used / limit} if limit else {})


def describe_times(
    wait_s: float,
    update_s: float,
    publish_s: float,
    checkpoint_s: float,
    publishing_s: float,
    lent_s: float,
    tokens: int,
) -> Metrics:
    """The seconds of a step's parts; `checkpoint_s` is of the checkpoint before it, `publishing_s` ran concurrently,
    `lent_s` is a part of the update."""
    step_s = checkpoint_s + wait_s + update_s + publish_s
    return {
        "time/wait_s": wait_s,
        "time/update_s": update_s,
        "time/publish_s": publish_s,
        "time/lent_s": lent_s,
        "time/publishing_s": publishing_s,
        "time/checkpoint_s": checkpoint_s,
        "time/step_s": step_s,
        "learner/idle_share": wait_s / step_s,
        "learner/tokens_per_s": tokens / update_s,
    }


class WorkerRates:
    """Turns the running totals that workers report into rates over a learner step."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._speeds: dict[str, float] = {}
        """Tokens per second of the requests of each worker that ended in the last step in which any did."""

    def since_last(self, workers: Mapping[str, WorkerStatus], had_questions: bool = True) -> Metrics:
        """Tokens per second of all workers, share of time their engines stood idle, the slowest one's speed; seconds of
        weight loading; wasted episodes; searches made and attempts failed, and the slowest worker's 99th percentile of
        a search's seconds. Without the first three where the workers had no questions left, which is the end of the run
        and not their speed, and where none has reported since the last step: a step can be shorter than a heartbeat.
        Where none is ready no token is sampled, and no engine idle."""
        now = {
            name: {key: float(getattr(status, key)) for key in _TOTALS}
            for name, status in workers.items()
            if status.alive_s > 0 and not status.starting  # when it is ready its clock starts at 0
        }
        zero = dict.fromkeys(_TOTALS, 0.0)
        since = {
            name: {key: value - self._last.get(name, zero)[key] for key, value in totals.items()}
            for name, totals in now.items()
        }
        self._last = now
        since = {name: totals for name, totals in since.items() if totals["alive_s"] > 0}
        total = {key: sum(totals[key] for totals in since.values()) for key in _TOTALS}
        longest_s = max((totals["alive_s"] for totals in since.values()), default=1.0)  # some one after the other
        rates: Metrics = {"rollout/tokens_per_s": total["sampled_tokens"] / longest_s}
        if since:
            rates["rollout/idle_share"] = max(0.0, 1 - total["busy_s"] / total["alive_s"])
        # of a request: who has few at once samples fewer tokens a second, and is not slow
        ended = {name: of["sampled_tokens"] / of["request_s"] for name, of in since.items() if of["request_s"] > 0}
        # who is slow ends none in many a step
        works = {name for name in now if workers[name].is_alive and workers[name].in_flight}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in works}
        self._speeds |= ended
        if len(self._speeds) > 1 and (usual := float(np.median([*self._speeds.values()]))) > 0:
            rates["rollout/slowest_share"] = min(self._speeds.values()) / usual
        return (rates if had_questions and (since or not now) else {}) | {
            "rollout/workers": float(sum(workers[name].is_alive for name in now)),
            "rollout/weight_load_s": total["weight_load_s"],
            "rollout/searches": total["searches"],
            "rollout/late_episodes": total["late_episodes"],
            "rollout/search_failures": total["search_failures"],
            "rollout/search_p99_s": max((workers[name].search_p99_s for name in since), default=0.0),
        }


def _singleton_mass(selected: Sequence[Trajectory], advantages: Advantages) -> float:
    """Share of the sum of |A|·tokens over the `selected`, sampled tokens, that lies on those alone in their group."""
    members = Counter(t.ticket for t in selected)
    mass = np.abs(advantages.values) * [t.sampled_tokens for t in selected]
    alone = np.array([members[t.ticket] == 1 for t in selected], dtype=bool)
    return float(mass[alone].sum() / mass.sum()) if mass.any() else 0.0


def _outcomes(trajectories: Sequence[Trajectory]) -> Metrics:
    """The shares of their groups whose answers are all right, mixed, and all wrong."""
    right: dict[int, list[bool]] = defaultdict(list)
    for t in trajectories:
        right[t.ticket].append(bool(t.em))
    return {
        "groups/solved_share": _mean(all(group) for group in right.values()),
        "groups/mixed_share": _mean(any(group) and not all(group) for group in right.values()),
        "groups/hopeless_share": _mean(not any(group) for group in right.values()),
    }


def _by_depth(values: NDArray[np.float64], depths: NDArray[np.int64], s_max: int) -> list[float | None]:
    """The mean of `values` at each depth 0..S_max, None where there is none."""
    return [float(values[depths == s].mean()) if s in depths else None for s in range(s_max + 1)]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else 0.0


def _histogram(trajectories: Sequence[Trajectory], s_max: int) -> list[int]:
    return count_depths(np.array([t.depth for t in trajectories], dtype=np.int64), s_max)
