"""Runs the runs of a study, one after the other, each as `cusearch launch` would."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from cusearch_async.config import is_loopback, overrides_of
from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.lifecycle.children import CLI, free_port, start_child, why_it_ended
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.run.folder import STARTS, refuse_if_held
from cusearch_async.study.plan import PLACES, Plan, PlannedRun, value_of
from cusearch_async.study.tables import Tables, done, failed, lacks_a_score

log = logging.getLogger(__name__)

WORK = "work"
"""Folder of the runs that are under way, in the study's folder; a run's is deleted when it is in the tables."""
_POLL_S = 0.2
_NOTE_S = 5.0
_LEAVE_S = 600.0
"""A launch that is told to stop has so long beside its learner, which may be silent for run.stall_s."""


def to_do(plan: Plan, tables: Tables, retry_failed: bool) -> list[PlannedRun]:
    """The runs that are not in the tables yet, in the plan's order; with `retry_failed` also those that failed."""
    statuses = tables.statuses
    again = {"failed"} if retry_failed else set()
    return [run for run in plan.runs.values() if statuses.get(run.id) in {None, *again}]


def run_all(
    plan: Plan, folder: Path, runs: Sequence[PlannedRun], on_done: Callable[[PlannedRun, str, float], None]
) -> None:
    """Make the `runs`, and add each to the tables in `folder` when it is over. One that an earlier call has begun is
    continued. `on_done` is called with each run, its status or reason of failure, and its seconds."""
    for name, status in Tables.read(folder).statuses.items():
        left = folder / WORK / name
        if status == "done" and (left.exists() or _seconds_path(left).exists()):
            _remove(left, plan, plan.runs.get(name))
    for run in runs:
        where = folder / WORK / run.id
        _wait_until_free(where, run.config.run.stall_s + _LEAVE_S)
        if lacks_a_score(run, where) and not any(key.endswith("objects") for key in places_of(plan, run, where)):
            log.warning("%s lacks steps or scores; it is made anew", run.id)
            _remove(where, plan, run)
        reason, wall_s = _launch(plan, run, where)
        try:
            row = failed(run, plan, reason, wall_s) if reason else done(run, plan, where, wall_s)
        except ConfigError as error:
            row = failed(run, plan, str(error), wall_s)
        if (where / STARTS).exists():
            shutil.copytree(where / STARTS, folder / STARTS / run.id, dirs_exist_ok=True)
        tables = Tables.read(folder)
        is_done = row.runs["status"][0] == "done"
        if is_done and (before := tables.failures.get(run.id)):
            row.runs["reason"] = f"it had failed: {before}"
        tables.with_run(row).write(folder)
        if is_done:
            _remove(where, plan, run)
        on_done(run, "done" if is_done else row.runs["reason"][0], wall_s)


def _remove(where: Path, plan: Plan, run: PlannedRun | None) -> None:
    """All of a run but its log; what it has in an object store stays."""
    weights = places_of(plan, run, where).get("weights.folder") if run is not None else None
    for folder in (*([Path(weights)] if weights else []), where):
        if folder.exists():
            shutil.rmtree(folder)
    _seconds_path(where).unlink(missing_ok=True)


def _launch(plan: Plan, run: PlannedRun, where: Path) -> tuple[str, float]:
    """Launch or continue a run in the folder `where`. Returns why it failed, or nothing, and the seconds of all
    attempts."""
    where.parent.mkdir(parents=True, exist_ok=True)
    output = where.with_name(f"{where.name}.log")
    seen = output.stat().st_size if output.exists() else 0
    before, began = _seconds_before(where), time.monotonic()
    child = start_child(_command(plan, run, where), log_file=output)
    noted = began
    try:
        while child.poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() > noted + _NOTE_S:
                noted = time.monotonic()
                _seconds_path(where).write_text(str(before + noted - began))
    except BaseException:
        child.terminate()
        child.wait()  # it bounds each of its processes; when this one ended it would be signalled again, which kills
        raise
    finally:
        wall_s = before + time.monotonic() - began
        _seconds_path(where).write_text(str(wall_s))
    return (_reason(child.returncode, why_it_ended(output, seen)) if child.returncode else "", wall_s)


def _command(plan: Plan, run: PlannedRun, where: Path) -> list[str]:
    own = {
        "run.name": _name(plan, run),
        "run.folder": str(where),
        "redis.url": f"redis://127.0.0.1:{free_port()}/0",
        **places_of(plan, run, where),
    }
    if is_loopback(run.config.retriever.url):  # launch starts it with the settings of this run
        own["retriever.url"] = f"http://127.0.0.1:{free_port()}"
    return [*CLI, "launch", *map(str, plan.study.configs), *run.arguments(), *overrides_of(own)]


def places_of(plan: Plan, run: PlannedRun, where: Path) -> dict[str, str]:
    """Of PLACES, those that the configs of the study set, for the run in the folder `where`. Another study may have the
    same run, or this one in another folder, and be under way."""
    given = {key: value_of(run.config, key) for key in PLACES}
    own = f"{_name(plan, run)}-{xxhash.xxh32_hexdigest(str(where.absolute()).encode())}"
    return {key: f"{str(value).rstrip('/')}/{own}" for key, value in given.items() if value}


def _name(plan: Plan, run: PlannedRun) -> str:
    """An own method has a colon."""
    return f"{plan.study.name}-{re.sub(r'[^A-Za-z0-9_.-]', '-', run.id)}"


def _wait_until_free(where: Path, patience_s: float) -> None:
    """A launch that an earlier call began may still be stopping. Raises: RunInUse when it does not."""
    deadline = time.monotonic() + patience_s
    with log_waiting(log, f"waiting for an earlier launch of {where.name} to stop"):
        while True:
            try:
                return refuse_if_held(where)
            except RunInUse:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)


def _reason(status: int, why: str) -> str:
    how = f"killed by signal {-status}" if status < 0 else f"exited with {status}"
    return f"{why} ({how})" if why else how


def _seconds_before(where: Path) -> float:
    """Of earlier attempts at a run."""
    path = _seconds_path(where)
    return float(path.read_text() or 0) if path.exists() else 0.0


def _seconds_path(where: Path) -> Path:
    return where.with_name(f"{where.name}.seconds")
