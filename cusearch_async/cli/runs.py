"""`cusearch runs`: the runs in a folder; `runs compare RUN RUN...`: their differences and curves; `runs plot RUN...`: a
plot of each, finished or not; `runs export RUN...`: their figures as a table; `runs fork RUN NEW`: another run that
continues from its checkpoint; `runs track RUN`: to W&B and others."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.arguments import add_trust
from cusearch_async.cli.parts.figure import draw, draw_together, refuse_format
from cusearch_async.cli.parts.fork import fork
from cusearch_async.cli.parts.terminal import cut, plain
from cusearch_async.dashboard.kept import FAILED, KeptRun, names_of
from cusearch_async.errors import ConfigError, first_line, packages_of
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.metrics import tracking
from cusearch_async.metrics.files import read_metrics, steps_done
from cusearch_async.metrics.table import PLACE, scores_of
from cusearch_async.run import identity
from cusearch_async.run.folder import METRICS
from cusearch_async.run.history import made_otherwise

log = logging.getLogger(__name__)

COLUMNS = ("run", "started", "method", "steps", "EM", "held-out", "depth", "outcome")
"""Of the list of runs. A wide terminal shows the year, the seed and `code`, the commit, too."""
WIDE = 110
COMPARED = {
    "reward/em": "EM, sampled",
    "reward/all": "reward",
    "depth/mean": "depth",
    "staleness/mean": "staleness",
    "groups/zero_variance_share": "equal rewards",
    "off_policy/ess": "ESS",
    "time/step_s": "seconds a step",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs are (runs)")
    parser.add_argument("--tag", help="only those with this one of run.tags")
    parser.set_defaults(run=list_runs)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    comparing = actions.add_parser("compare", help="say what differs between runs, and draw their curves together")
    comparing.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="two or more, like runs/demo")
    comparing.add_argument("--output", type=Path, default=Path("compare.png"), help="the plot (compare.png)")
    comparing.set_defaults(run=compare)
    drawing = actions.add_parser("plot", help="draw plot.png of runs, finished or not")
    drawing.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="such as runs/demo")
    drawing.set_defaults(run=plot)
    exporting = actions.add_parser("export", help="write the figures of runs as one table, a row for each")
    exporting.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="such as runs/demo")
    exporting.add_argument("--output", type=Path, required=True, help="the .parquet file to write")
    exporting.set_defaults(run=export)
    following = actions.add_parser("track", help="send a run's figures to its trackers")
    following.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    text = "wandb, trackio, mlflow, or a class as package.module:Name (the run's run.trackers)"
    following.add_argument("--tracker", action="append", default=[], metavar="NAME", help=text)
    text = "continue until the run is finished; otherwise send what is there, and end"
    following.add_argument("--follow", action="store_true", help=text)
    add_trust(following)
    following.set_defaults(run=track)
    forking = actions.add_parser("fork", help="begin another run with a checkpoint of this one, to try other settings")
    forking.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    forking.add_argument("new", type=Path, metavar="NEW_FOLDER", help="of the other run, which is named like it")
    forking.add_argument("--step", type=int, help="of the checkpoint (the newest)")
    forking.set_defaults(run=fork)


def list_runs(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError when there is none."""
    folders = [path for path in sorted(arguments.folder.glob("*")) if (path / "run.json").is_file()]
    if not folders:
        raise ConfigError(f"{arguments.folder} holds no run; give the folder that your runs are in")
    console = Console()
    is_wide = console.width >= WIDE
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*COLUMNS, "seed", "code") if is_wide else COLUMNS:
        is_number = name in ("seed", "steps", "EM", "held-out", "depth")
        shown.add_column(name, justify="right" if is_number else "left", no_wrap=name not in ("run", "method"))
    errors = []
    for folder in folders:
        try:
            run = KeptRun.read(folder)
            tags = run.setting("run", "tags")
            if arguments.tag and not (isinstance(tags, list) and arguments.tag in tags):
                continue
            cells, why = _cells(run, is_wide), run.error
        except (ConfigError, OSError) as error:  # such a run hides no other
            cells, why = [folder.name, *["–"] * (len(COLUMNS) - 2), "not readable"], first_line(error)
        shown.add_row(*map(cut, cells))
        if why is not None:
            errors.append(f"{folder.name} {FAILED}: {why}")
    console.print(shown)
    for line in errors:
        console.print(plain(line), soft_wrap=True)


def _local(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone().isoformat(" ")
    except ValueError:  # written by hand, or by nobody
        return time


def _cells(run: KeptRun, is_wide: bool) -> list[str]:
    last = run.rows[-1] if run.rows else {}
    start = run.starts[-1] if run.starts else None
    return [
        run.folder.name,
        _local(run.starts[0].time)[0 if is_wide else 5 : 16] if run.starts else "–",
        str(run.setting("method", "name")),
        f"{steps_done(run.rows)}/{run.setting('run', 'steps')}",
        _figure(last, "reward/em"),
        "–" if run.last_em is None else f"{run.last_em:.2f}",
        _figure(last, "depth/mean"),
        run.outcome,
        *([str(run.setting("run", "seed")), (start and start.commit) or "–"] if is_wide else []),
    ]


def _figure(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if isinstance(row.get(name), float | int) else "–"


def compare(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for fewer than two runs, or one without a step."""
    if len(arguments.folders) < 2:
        raise ConfigError("compare needs two runs or more: cusearch runs compare runs/one runs/other")
    refuse_format(arguments.output, "--output")
    refuse_unwritable(arguments.output, "--output")
    runs = [KeptRun.read(folder) for folder in arguments.folders]
    for run in runs:
        if not run.rows:
            raise ConfigError(f"{run.folder / METRICS} holds no step yet; there is nothing to compare")
    console = Console()
    first = runs[0]
    for other in runs[1:]:
        console.print(f"{other.folder} against {first.folder}:", soft_wrap=True, markup=False)
        for line in differences(first, other) or ["settings, packages, machine, code, data and model are the same"]:
            console.print(plain(f"  {line}"), soft_wrap=True)
    console.print(_figures(runs))
    held_out = {str(run.folder): list(_em_by_version(run).items()) for run in runs}
    with writing_output(arguments.output, "--output"):
        draw_together({str(run.folder): run.rows for run in runs}, held_out, arguments.output)
    console.print(f"plot    {arguments.output}", soft_wrap=True)


def differences(first: KeptRun, other: KeptRun) -> list[str]:
    """The differences between two runs, a line each: settings, then code, machine and data; and what is not known."""
    found = identity.differences(identity.texts_of(other.settings), identity.texts_of(first.settings))
    if not first.starts or not other.starts:
        return [*map(str, found), "packages, machine, code, data and model: not recorded by both runs"]
    before, after = first.starts[-1], other.starts[-1]
    lines = [str(difference) for difference in (*found, *made_otherwise(before, after))]
    is_unknown = not before.weights and not after.weights
    return [*lines, *(["weights of model.path: not recorded by either run"] if is_unknown else [])]


def _figures(runs: Sequence[KeptRun]) -> Table:
    """Means over the last fifth of the steps that all of them have, by their numbers."""
    common = sorted(set.intersection(*({row["step"] for row in run.rows} for run in runs)))
    if not common:
        raise ConfigError("these runs have no step in common")
    last = set(common[-max(1, len(common) // 5) :])
    shown = Table(title=f"means of steps {min(last)} to {max(last)}", title_justify="left")
    shown.add_column("")
    for name in names_of([run.folder for run in runs]):
        shown.add_column(plain(name), justify="right", overflow="fold")
    for name, text in COMPARED.items():
        shown.add_row(text, *(_mean([row for row in run.rows if row["step"] in last], name) for run in runs))
    shown.add_row(*_held_out(runs))
    return shown


def _held_out(runs: Sequence[KeptRun]) -> list[str]:
    """EM of the newest version that all have scored; where there is none, of the newest of each."""
    scores = [_em_by_version(run) for run in runs]
    if common := set.intersection(*map(set, scores)):
        version = max(common)
        return [f"EM, held-out, version {version}", *(f"{one[version]:.3f}" for one in scores)]
    newest = ("–" if run.last_em is None else f"{run.last_em:.3f}" for run in runs)
    versions = (f" (version {max(one)})" if one else "" for one in scores)
    return ["EM, held-out, last", *map("".join, zip(newest, versions, strict=True))]


def _em_by_version(run: KeptRun) -> dict[int, float]:
    """Held-out."""
    return {row["step"]: row["all"]["em"] for row in run.scores if "em" in row.get("all", {})}


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    known = [row[name] for row in rows if isinstance(row.get(name), float | int)]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def plot(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for a folder without metrics, or one that cannot be written."""
    for folder in arguments.folders:
        rows = read_metrics(folder / METRICS)
        if not rows:
            raise ConfigError(f"{folder / METRICS} holds no step yet; give the folder of a run, like runs/demo")
        picture = folder / "plot.png"
        with writing_output(picture, "the picture"):
            draw(rows, str(folder), picture)
        log.info("drew %s", picture)


def export(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for a folder that is no run's, or a file that cannot be written."""
    with packages_of("study"):
        import pyarrow as pa  # noqa: PLC0415  (of an extra)
        from pyarrow import parquet  # noqa: PLC0415

    output: Path = arguments.output
    refuse_unwritable(output, "--output", ".parquet")
    named = zip(arguments.folders, names_of(arguments.folders), strict=True)
    rows = [row for folder, name in named for row in long_form(KeptRun.read(folder), name)]
    kinds = {"run": pa.string(), "step": pa.int64(), "metric": pa.string(), "depth": pa.int64(), "value": pa.float64()}
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    with writing_output(output, "--output"):
        parquet.write_table(table, output)
    log.info("wrote %d figures to %s", len(rows), output)


def track(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for a folder that is no run's, or no tracker; TrackerFailed; RunInUse."""
    run = KeptRun.read(arguments.folder)
    if not run.settings:
        raise ConfigError(f"{run.folder} has no config.toml: give the folder of a run that was launched")
    names = arguments.tracker or run.setting("run", "trackers")
    if not isinstance(names, list) or not names or not isinstance(run.setting("run", "steps"), int):
        raise ConfigError(f"the config of {run.folder} names no tracker; name one: --tracker wandb")
    tracking.track(run.folder, run.settings, list(dict.fromkeys(names)), arguments.follow)


def long_form(run: KeptRun, name: str) -> Iterator[dict[str, Any]]:
    """A row for each figure: run, step, metric, depth (null where it is not by depth) and value. Scores of held-out
    questions are metrics `eval/CATEGORY/FIGURE`, at the version that was scored."""
    for row in run.rows:
        for metric, value in row.items():
            by_depth = value if isinstance(value, list) else [value]
            for depth, one in enumerate(by_depth):
                if isinstance(one, int | float) and metric not in PLACE:
                    at = {"run": name, "step": row["step"], "metric": metric}
                    yield at | {"depth": depth if isinstance(value, list) else None, "value": float(one)}
    for scored in run.scores:
        for metric, figure in scores_of(scored).items():
            at = {"run": name, "step": scored["step"], "metric": metric}
            yield at | {"depth": None, "value": figure}
