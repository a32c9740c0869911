"""`cusearch study FILE.toml`: makes the runs of a study that are still to do, and writes its report."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cusearch_async.errors import ConfigError, RunInUse, StudyIncomplete

if TYPE_CHECKING:
    from cusearch_async.study.plan import Plan, PlannedRun
    from cusearch_async.study.tables import Tables

_COPY = "study.toml"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the study's TOML file")
    parser.add_argument("--folder", type=Path, help="the study's folder; default: runs/studies/NAME")
    parser.add_argument("--report", action="store_true", help="make no runs; write the report from the tables")
    parser.add_argument("--retry-failed", action="store_true", help="make failed runs again")
    parser.add_argument("--most", type=int, help="end after so many runs")
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
        left = [] if arguments.report else to_do(plan, before, arguments.retry_failed)
        _describe(plan, before, len(left), console)
        with _progress(console) as progress:
            task = progress.add_task("runs", total=len(left[: arguments.most]))

            def tell(one: PlannedRun, outcome: str, seconds: float) -> None:
                progress.advance(task)
                progress.console.print(f"{one.id}: {outcome}, {seconds:.0f} s", soft_wrap=True, markup=False)

            run_all(plan, folder, left[: arguments.most], tell)
        tables = Tables.read(folder)
        if not len(tables.runs):
            raise StudyIncomplete(f"study {plan.study.name} has no run yet in {folder}")
        console.print(f"report  {write_report(plan, tables, folder)}", soft_wrap=True)
    _conclude(plan, tables)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(TextColumn("runs"), *columns, console=console, disable=not console.is_terminal)


def _describe(plan: Plan, tables: Tables, left: int, console: Console) -> None:
    done = tables.runs[tables.runs["status"] == "done"] if len(tables.runs) else tables.runs
    each = f", about {left * done['wall_s'].mean() / 3600:.1f} hours" if len(done) and left else ""
    console.print(f"study {plan.study.name}: {len(plan.runs)} runs, {len(done)} done, {left} to do{each}")


def _conclude(plan: Plan, tables: Tables) -> None:
    """Raises: StudyIncomplete."""
    statuses = [tables.statuses.get(name) for name in plan.runs]
    missing, failures = statuses.count(None), statuses.count("failed")
    if missing or failures:
        raise StudyIncomplete(f"{missing} runs are to do and {failures} failed; the report is of the others")


@contextlib.contextmanager
def claimed(folder: Path, file: Path, plan: Plan) -> Iterator[None]:
    """Lock the folder of a study, which is made here or belongs to it already.

    Raises: ConfigError when it is another study's, or this one's with other primary measures; RunInUse."""
    from cusearch_async.study.plan import Claim, read_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / _COPY
    if copy.exists():
        before = read_file(copy)
        for name, was, now in (
            ("name", before.study.name, plan.study.name),
            ("primary measures", before.study.primary, plan.study.primary),
            ("claims", *("; ".join(map(Claim.model_dump_json, claims)) for claims in (before.claim, plan.claims))),
        ):
            if was != now:
                raise ConfigError(f"{folder} is the folder of a study with the {name} {was}, not {now}; choose another")
    elif any(path.suffix == ".parquet" for path in folder.iterdir()):
        raise ConfigError(f"{folder} has tables but no {_COPY}; it is not the folder of a study")
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUse(f"{folder} is in use: another `cusearch study` runs in it") from error
        if file.resolve() != copy.resolve():
            shutil.copyfile(file, copy)
        yield
