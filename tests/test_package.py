"""The wheel works in an empty folder: it needs no checkout, and takes nothing that lies there for its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cusearch_async.metrics.files import read_metrics
from cusearch_async.run import folder as run_folder
from tests.conftest import SLOW, free_port
from tests.system.conftest import SMALL

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built from a copy of the tree without a network."""
    tree, unpacked = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("unpacked")
    shutil.copytree(ROOT / "cusearch_async", tree / "cusearch_async", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "workers", tree / "workers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tree / "dist")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True, timeout=120 * SLOW)
    (built,) = (tree / "dist").glob("*.whl")
    zipfile.ZipFile(built).extractall(unpacked)
    return unpacked


@pytest.fixture
def start(wheel: Path, tmp_path: Path):
    """`python -m ...` in an empty folder with the wheel alone."""

    def run(*command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(wheel), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command, timeout_s = (sys.executable, "-m", *command), timeout_s * SLOW
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


def test_a_wheel_has_one_name_at_the_top_level_and_every_file_of_the_package(wheel: Path):
    assert {path.name.split("-")[0] for path in wheel.iterdir()} == {"cusearch_async"}
    package = ROOT / "cusearch_async"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {path.relative_to(wheel / "cusearch_async") for path in (wheel / "cusearch_async").rglob("*.*")}


def test_an_installed_package_checks_a_shipped_config_in_an_empty_folder(start, tmp_path: Path):
    done = start("cusearch_async.cli.main", "check", "atlas")
    assert done.returncode == 0, done.stderr
    assert "1024" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["learner", "rollout", "evaluator", "retriever"])
def test_a_users_own_folders_shadow_nothing(start, tmp_path: Path, name: str):
    for folder in ("workers", "configs", "atlas"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('this is not yours')")
    (tmp_path / "configs" / "atlas.toml").write_text("this is not valid TOML")
    done = start("cusearch_async.cli.main", "worker", name, "atlas", "--run.wait_s", "nothing")
    assert done.returncode == 1
    assert (
        done.stderr
        == f"{name}: run.wait_s: input should be a valid number, unable to parse string as a number, got 'nothing'\n"
    )


@pytest.mark.slow
def test_a_demo_runs_in_an_empty_folder_and_says_what_it_found(start, wheel: Path, tmp_path: Path):
    """With literal SDGA-Phase: most episodes of the starter have depth 1, which alone fills half a pool."""
    literal = {"method.phase_reserve": 0, "method.budget": 16, "loss.minibatch": 16, "pool.questions": 16}
    addresses = {"redis.url": f"redis://127.0.0.1:{free_port()}/0", "retriever.url": f"http://127.0.0.1:{free_port()}"}
    changes = SMALL | literal | addresses | {"rollout.max_episodes": 32}
    settings = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
    run, aside = tmp_path / "runs" / "demo", tmp_path / "runs" / "demo-1"
    run_folder.mark(run, "atlas")
    (run / "summary.json").write_text("of an earlier demo")
    done = start("cusearch_async.cli.main", "demo", "--steps", "2", *settings, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (first_start,) = (run / "starts").glob("*.json")
    assert str(wheel) in first_start.read_text(), "the processes are the wheel's"
    assert (aside / "summary.json").read_text() == "of an earlier demo"

    said, rows = " ".join((done.stdout + done.stderr).split()), read_metrics(run / "metrics.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    assert "the earlier demo is kept in runs/demo-1" in said
    assert "held-out questions, greedy: before → after" in said
    assert [row["step"] for row in rows] == [0, 1]
    assert summary["steps"] == 2
    assert summary["by_category"]
    assert summary["ledger"]["closes"]
    assert summary["trajectories_trained"] == summary["ledger"]["trained"] == 32
    assert 0 <= summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert summary["em_before"] <= 0.35
    assert (run / "plot.png").stat().st_size > 10_000
    assert (run / "checkpoints" / "step000002-e1" / "model" / "model.safetensors").exists()
    assert (run / "config.toml").exists()

    trapped = [row["selection/phase_trapped"] for row in rows]
    assert 1 in trapped
    assert summary["phase_trapped_steps"] == sum(trapped)
    assert "the phase is trapped: depth 1 alone fills the budget" in (run / "logs" / "learner.log").read_text()
    assert f"the phase was trapped in {int(sum(trapped))} of 2 steps" in said

    done = start("cusearch_async.cli.main", "reset", str(run / "config.toml"), "--yes")
    assert done.returncode == 0, done.stderr
    assert not run.exists(), "everything that a run writes is known and deleted"
    assert aside.exists()
