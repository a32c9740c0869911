"""What the workers say of themselves, as rates over a learner step."""

from __future__ import annotations

from collections.abc import Mapping

from cusearch_async.metrics.table import Metrics
from cusearch_async.transport.interface import WorkerStatus

_TOTALS = ("sampled_tokens", "busy_s", "alive_s", "weight_load_s", "searches", "search_failures")


class WorkerRates:
    """Turns the running totals that workers report into rates over a learner step."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}

    def since_last(self, workers: Mapping[str, WorkerStatus]) -> Metrics:
        """Tokens per second of all workers, share of time their engines stood idle, seconds of weight loading; searches
        made and attempts failed, and the slowest worker's 99th percentile of a search's seconds."""
        now = {
            name: {key: float(getattr(status, key)) for key in _TOTALS}
            for name, status in workers.items()
            if status.alive_s > 0
        }
        zero = dict.fromkeys(_TOTALS, 0.0)
        since = {
            name: {key: value - self._last.get(name, zero)[key] for key, value in totals.items()}
            for name, totals in now.items()
        }
        self._last = now
        spoken = [name for name, totals in since.items() if totals["alive_s"] > 0]
        grown = [since[name] for name in spoken]
        alive = sum(g["alive_s"] for g in grown)
        return {
            "rollout/workers": float(len(grown)),
            "rollout/tokens_per_s": sum(g["sampled_tokens"] / g["alive_s"] for g in grown),
            "rollout/idle_share": max(0.0, 1 - sum(g["busy_s"] for g in grown) / alive) if alive else 0.0,
            "rollout/weight_load_s": sum(g["weight_load_s"] for g in grown),
            "rollout/searches": sum(g["searches"] for g in grown),
            "rollout/search_failures": sum(g["search_failures"] for g in grown),
            "rollout/search_p99_s": max((workers[name].search_p99_s for name in spoken), default=0.0),
        }
