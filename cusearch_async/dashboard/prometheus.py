"""A run's newest figures in Prometheus' text format: those of its last step, and of its workers and alarms now.

cusearch_reward_all{run="demo"} 0.51
cusearch_depth_generated{run="demo",depth="2"} 55
cusearch_environment_reward{run="demo",environment="web"} 0.43
cusearch_worker_episodes{run="demo",worker="h-71"} 982
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
OF_WORKER = ("in_flight", "episodes", "failed_episodes", "sampled_tokens", "busy_s", "heartbeat_age_s", "search_p99_s")

_ENVIRONMENT = "environment/"


def exposition(run: str, row: Mapping[str, Any], firing: list[str], live: Mapping[str, Any] | None) -> bytes:
    """`row`: of the newest step, empty before the first; `firing`: names of alarms; `live`: of `Live.now`."""
    registry = CollectorRegistry()
    registry.register(_Newest(list(_families(run, row, firing, live or {}))))
    return generate_latest(registry)


class _Newest(Collector):
    def __init__(self, families: list[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families


def _families(
    run: str, row: Mapping[str, Any], firing: list[str], live: Mapping[str, Any]
) -> Iterator[GaugeMetricFamily]:
    for name, value in sorted(row.items()):
        if isinstance(value, list):
            found = _family(name, ["run", "depth"])
            for depth, one in enumerate(value):
                if one is not None:
                    found.add_metric([run, str(depth)], one)
            yield found
        elif isinstance(value, int | float) and not name.startswith(_ENVIRONMENT):
            found = _family(name, ["run"])
            found.add_metric([run], value)
            yield found
    yield from _of_environments(run, row)
    alarms = _family("alarm", ["run", "alarm"])
    for name in firing:
        alarms.add_metric([run, name], 1)
    yield alarms
    for name in OF_WORKER if "workers" in live else ():
        found = _family(f"worker/{name}", ["run", "worker"])
        for worker in live["workers"]:
            is_past = name == "in_flight" and not worker["is_alive"]
            found.add_metric([run, worker["name"]], 0 if is_past else worker[name])
        yield found


def _of_environments(run: str, row: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    families: dict[str, GaugeMetricFamily] = {}
    for name, value in sorted(row.items()):
        if name.startswith(_ENVIRONMENT) and isinstance(value, int | float):
            environment, _, figure = name.removeprefix(_ENVIRONMENT).rpartition("/")
            found = families.setdefault(figure, _family(_ENVIRONMENT + figure, ["run", "environment"]))
            found.add_metric([run, environment], value)
    yield from families.values()


def _family(name: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cusearch_{re.sub('[^a-zA-Z0-9_]', '_', name)}", name, labels=labels)
