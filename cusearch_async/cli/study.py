"""`cusearch study FILE.toml`: makes the runs of a study that are still to do, and writes its report."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cusearch_async.cli.parts.arguments import at_least
from cusearch_async.cli.parts.terminal import duration
from cusearch_async.errors import ConfigError, StudyIncomplete
from cusearch_async.files import write_file
from cusearch_async.run.folder import locked

if TYPE_CHECKING:
    from cusearch_async.study.plan import Plan, PlannedRun, StudyFile
    from cusearch_async.study.tables import Tables

_COPY = "study.toml"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the study's TOML file")
    parser.add_argument("--folder", type=Path, help="the study's folder; default: runs/studies/NAME")
    parser.add_argument("--report", action="store_true", help="make no runs; write the report from the tables")
    parser.add_argument("--retry-failed", action="store_true", help="make failed runs again")
    parser.add_argument("--max-runs", type=at_least(1), help="stop after so many runs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError; StudyIncomplete when runs are left, or some failed."""
    from cusearch_async.study.plan import read_plan  # noqa: PLC0415  (pandas and scipy only where they are needed)
    from cusearch_async.study.report import write_report  # noqa: PLC0415
    from cusearch_async.study.running import run_all, to_do  # noqa: PLC0415
    from cusearch_async.study.tables import Tables  # noqa: PLC0415

    plan = read_plan(arguments.file)
    folder = arguments.folder or Path("runs") / "studies" / plan.study.name
    console = Console()
    with claimed(folder, arguments.file, plan):
        before = Tables.read(folder)
        left = [] if arguments.report else to_do(plan, before, arguments.retry_failed)[: arguments.max_runs]
        run_all(plan, folder, left, _reporter(plan, before, len(left), console))
        tables = Tables.read(folder)
        if not len(tables.runs):
            raise StudyIncomplete(f"study {plan.study.name} has no run yet in {folder}")
        tables.write_csv(folder)
        console.print(f"report  {write_report(plan, tables, folder)}", soft_wrap=True)
    _conclude(plan, tables)


def _reporter(plan: Plan, tables: Tables, left: int, console: Console) -> Callable[[PlannedRun, str, float], None]:
    """Prints a line for each run that is over, with how long the rest will take, from the mean of the runs before."""
    rows = tables.of(list(plan.runs.values()))
    seconds = list(rows[rows["status"] == "done"]["wall_s"])

    def rest(separator: str) -> str:
        if not seconds or not left:
            return ""
        return f"{separator} about {duration(left * sum(seconds) / len(seconds))} left"

    def report(run: PlannedRun, outcome: str, wall_s: float) -> None:
        nonlocal left
        left -= 1
        if outcome == "done":
            seconds.append(wall_s)
        console.print(f"{run.id}: {outcome}, {wall_s:.0f} s{rest(';')}", soft_wrap=True, markup=False)

    console.print(f"study {plan.study.name}: {len(plan.runs)} runs, {len(seconds)} done, {left} to do now{rest(',')}")
    return report


def _conclude(plan: Plan, tables: Tables) -> None:
    """Raises: StudyIncomplete."""
    statuses = [tables.statuses.get(name) for name in plan.runs]
    missing, failures = statuses.count(None), statuses.count("failed")
    if missing or failures:
        raise StudyIncomplete(f"{missing} runs are to do and {failures} failed; the report is of the others")


@contextlib.contextmanager
def claimed(folder: Path, file: Path, plan: Plan) -> Iterator[None]:
    """Lock the folder of a study, which is made here or belongs to it already.

    Raises: ConfigError when it is another study's, or this one's with other primary measures or claims; RunInUse."""
    from cusearch_async.study.plan import read_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", fcntl.LOCK_EX, f"{folder} is in use: another `cusearch study` runs in it"):
        copy = folder / _COPY
        if copy.exists():
            _check_same(plan, read_file(copy), folder)
        elif any(path.suffix == ".parquet" for path in folder.iterdir()):
            raise ConfigError(f"{folder} has tables but no {_COPY}; it is not the folder of a study")
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            write_file(copy, file.read_bytes())
        yield


def _check_same(plan: Plan, before: StudyFile, folder: Path) -> None:
    """Raises: ConfigError for the folder of another study, or of this one with other primary measures, claims, or seeds
    of what is claimed: who may change them finds something sooner or later."""
    claims = (
        "; ".join(claim.model_dump_json(exclude={"reported"}) for claim in one) for one in (before.claim, plan.claims)
    )
    claimed = {claim.part for claim in plan.claims}
    seeds = (
        ", ".join(f"{part.name}: {part.seeds}" for part in parts if part.name in claimed)
        for parts in (before.part, plan.parts)
    )
    for name, was, now in (
        ("name", before.study.name, plan.study.name),
        ("primary measures", before.study.primary, plan.study.primary),
        ("claims", *claims),
        ("seeds of claims", *seeds),
    ):
        if was != now:
            raise ConfigError(f"{folder} is the folder of a study with the {name} {was}, not {now}; choose another")
