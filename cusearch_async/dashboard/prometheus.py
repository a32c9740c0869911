"""A run's newest figures in Prometheus' text format: those of its last step, and of its workers and alarms now.

cusearch_reward_all{run="demo"} 0.51
cusearch_depth_generated{run="demo",depth="2"} 55
cusearch_environment_reward{run="demo",environment="web"} 0.43
cusearch_worker_episodes{run="demo",worker="h-71"} 982
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
OF_WORKER = ("in_flight", "episodes", "failed_episodes", "sampled_tokens", "busy_s", "heartbeat_age_s", "search_p99_s")

_ENVIRONMENT = "environment/"


def exposition(run: str, row: Mapping[str, Any], firing: list[str], live: Mapping[str, Any] | None) -> bytes:
    """`row`: of the newest step, empty before the first; `firing`: names of alarms; `live`: of `Live.now`."""
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()

    def gauge(name: str, *labels: str) -> Gauge:
        key = f"cusearch_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
        if key not in gauges:
            gauges[key] = Gauge(key, name, ["run", *labels], registry=registry)
        return gauges[key]

    for name, value in sorted(row.items()):
        environment, _, figure = name.removeprefix(_ENVIRONMENT).rpartition("/")
        if isinstance(value, list):
            by_depth = gauge(name, "depth")
            for depth, one in enumerate(value):
                if one is not None:
                    by_depth.labels(run, depth).set(one)
        elif isinstance(value, int | float) and name.startswith(_ENVIRONMENT):
            gauge(_ENVIRONMENT + figure, "environment").labels(run, environment).set(value)
        elif isinstance(value, int | float):
            gauge(name).labels(run).set(value)
    alarms = gauge("alarm", "alarm")
    for name in firing:
        alarms.labels(run, name).set(1)
    workers = (live or {}).get("workers")
    for name in OF_WORKER if workers is not None else ():
        of_workers = gauge(f"worker/{name}", "worker")
        for worker in workers or ():
            is_past = name == "in_flight" and not worker["is_alive"]
            of_workers.labels(run, worker["name"]).set(0 if is_past else worker[name])
    return generate_latest(registry)
