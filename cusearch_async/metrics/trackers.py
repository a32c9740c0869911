"""Where a team keeps its curves: Weights & Biases, Trackio, MLflow, or a class of the user.

Projects, servers and keys are settings of the trackers themselves, in their environment variables."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cusearch_async.config.keys import flat
from cusearch_async.errors import MissingExtra, packages_of
from cusearch_async.extensions import load

PROJECT = "cusearch"
"""Where the tracker's environment names no project."""
_PARAMETER_LENGTH = 500
_PARAMETERS_AT_ONCE = 100
_REFUSED_BY_MLFLOW = re.compile(r"[^/\w.\- :]+")
"""In the name of a metric or tag; categories of questions are users' words."""
_WANDB_TAG = 64
"""Characters."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    id: str
    """The same whenever the run is continued, and another for another run of the same name."""
    name: str
    folder: Path
    """For the tracker's files; a folder in the run's."""
    settings: dict[str, Any]
    """The config, by section, without hooks of alarms."""


class Tracker(ABC):
    """One run in a tracker. A run that was tracked before is continued. Whatever a method raises is logged, and it is
    called again later; the run itself never waits."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step, or the scores of version `step`. A learner that goes back to a checkpoint makes its
        steps again."""

    def close(self, is_finished: bool) -> None:
        """Called once, when the run `is_finished`, or this process ends before that."""
        return


class Wandb(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        with packages_of("trackers"):
            import wandb  # noqa: PLC0415  (of an extra)

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=run.settings,
            notes=run.settings["run"].get("note", ""),
            tags=[tag[:_WANDB_TAG] for tag in run.settings["run"].get("tags", ())],
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own counter only goes up

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, is_finished: bool) -> None:
        self._run.finish()


class Trackio(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        with packages_of("trackers"):
            import trackio  # noqa: PLC0415  (of an extra)

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{run.name}-{run.id[:8]}"  # it continues runs by their name
        self._run = trackio.init(project=project, name=name, config=run.settings, resume="allow", auto_log_cpu=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, is_finished: bool) -> None:
        self._run.finish()


class MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        with packages_of("trackers"):
            import mlflow  # noqa: PLC0415  (of an extra)
            from mlflow import entities  # noqa: PLC0415

        self._entities = entities
        self._client = client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        place = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([place], f"tags.`cusearch.run` = '{run.id}'")
        known: Mapping[str, str] = {}
        if found:
            self._id, known = found[0].info.run_id, found[0].data.params
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {"cusearch.run": run.id, "mlflow.note.content": run.settings["run"].get("note", "")}
            tags |= {_REFUSED_BY_MLFLOW.sub("_", tag): "" for tag in run.settings["run"].get("tags", ())}
            self._id = client.create_run(place, run_name=run.name, tags=tags).info.run_id
        missing = [(key, value) for key, value in flat(run.settings) if key not in known]
        settings = [entities.Param(key, str(value)[:_PARAMETER_LENGTH]) for key, value in missing]
        for start in range(0, len(settings), _PARAMETERS_AT_ONCE):
            client.log_batch(self._id, params=settings[start : start + _PARAMETERS_AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {_REFUSED_BY_MLFLOW.sub("_", name): value for name, value in values.items()}
        metrics = [self._entities.Metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "wandb": (Wandb, "wandb"),
    "trackio": (Trackio, "trackio"),
    "mlflow": (MLflow, "mlflow"),
}
"""With the package that each needs."""


def tracker_class(name: str) -> type[Tracker]:
    """Of run.trackers: a built-in one, or `package.module:Name`. Nothing large is imported.

    Raises: MissingExtra; ConfigError for a class that cannot be imported, or is no Tracker."""
    if name not in TRACKERS:
        return load("run.trackers", name, Tracker, TRACKERS)  # type: ignore[type-abstract]
    kind, package = TRACKERS[name]
    if find_spec(package) is None:
        raise MissingExtra(f"run.trackers: {package} is not installed: pip install 'cusearch-async[trackers]'")
    return kind
