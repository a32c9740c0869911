"""What `make bench-lm` does not do again after it was stopped, and what of it does not go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cusearch_async.errors import RunInUse
from cusearch_async.run import folder as run_folder
from tests.bench import bench_lm, bench_lora, lm_over_trl
from tests.bench.lm_over_trl import CASE, SAVED
from tests.conftest import SLOW, wait_until

SECONDS = 600.5
"""Of this trainer's run."""


def write_trl(output: Path, seconds: float, ends: list[float]) -> None:
    """What TRL's side leaves of a case of so many seconds: models that were saved at `ends`."""
    (output / CASE).write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
    lines = [json.dumps({"step": n, "seconds": end, "model": f"of-trl/step-{n}"}) for n, end in enumerate(ends, 1)]
    (output / SAVED).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class Scores:
    """A fleet whose evaluations give an exact match of 0.5, but the one of a model named `killed`."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def __enter__(self) -> Scores:
        return self

    def __exit__(self, *_: object) -> None: ...
    def start_services(self) -> None: ...
    def stop(self, name: str) -> None: ...
    def wait(self, is_over: object) -> None: ...

    def start_command(self, name: str, command: str, options: list[str]) -> None:
        output, model = Path(options[-1]), options[1]
        self.scored.append(model)
        if "killed" in model:
            output.write_text('{"sco', encoding="utf-8")
            raise KeyboardInterrupt
        output.write_text(json.dumps({"scores": {"all": {"em": 0.5}}}), encoding="utf-8")


@pytest.fixture
def scores(monkeypatch) -> Scores:
    """In place of the processes that `compare` starts, of a run of one checkpoint after SECONDS."""
    fleet = Scores()
    config = SimpleNamespace(folder=None, model=SimpleNamespace(location="warm/model"), pool=SimpleNamespace(size=48))
    config.rollout = config.learner = SimpleNamespace(cores=())

    def load_config(_, words):
        return SimpleNamespace(**vars(config) | {"folder": Path(words[1])})

    of_steps = {1: SimpleNamespace(path=Path("ours/step-1"))}
    monkeypatch.setattr(lm_over_trl, "load_config", load_config)
    monkeypatch.setattr(lm_over_trl, "Fleet", lambda config: fleet)
    monkeypatch.setattr(lm_over_trl, "read_metrics", lambda path: [{"time/step_s": SECONDS}])
    monkeypatch.setattr(lm_over_trl, "checkpoints_of", lambda config: SimpleNamespace(by_step=lambda: of_steps))
    monkeypatch.setattr(lm_over_trl, "draw", lambda curves, path: None)
    return fleet


@pytest.mark.parametrize(
    ("seconds", "ends", "is_used"),
    [
        (SECONDS, [200.0, 400.0, 600.0, 610.0], True),
        (SECONDS, [400.0, 610.0], True),
        (SECONDS, [200.0, 400.0, 600.0, 600.4], False),
        (SECONDS - 0.25, [610.0], False),
    ],
    ids=["whole", "of long steps", "killed", "of another run"],
)
def test_what_trl_trained_and_what_was_scored_is_used_if_it_is_whole_and_of_this_run(
    tmp_path, monkeypatch, scores, seconds, ends, is_used
):
    folder, trained = tmp_path / "over", []

    def run(command, **_):
        trained.append(command)
        write_trl(Path(command[-1]).parent, SECONDS, [610.0])

    monkeypatch.setattr(subprocess, "run", run)
    (folder / "trl").mkdir(parents=True)
    write_trl(folder / "trl", seconds, ends)
    (folder / "eval_of-trl-step-1.json").write_text(json.dumps({"scores": {"all": {"em": 0.25}}}), encoding="utf-8")
    found = lm_over_trl.compare(tmp_path / "run", folder, [], [])
    assert len(trained) == (not is_used)
    assert ("of-trl/step-1" in scores.scored) == (not is_used)
    assert found["em_over_seconds"]["trl"][1]["em"] == (0.25 if is_used else 0.5)
    assert found["over_trl_end_to_end"] == pytest.approx((1 / SECONDS) / (len(ends) / ends[-1] if is_used else 1 / 610))


def test_a_score_that_was_not_written_whole_is_taken_again(tmp_path, scores):
    config = SimpleNamespace(folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        lm_over_trl.score(scores, config, "a/killed")
    scores.start_command = lambda name, command, options: Path(options[-1]).write_text('{"scores":{"all":{"em":1}}}')
    assert lm_over_trl.score(scores, config, "a/killed") == 1


def test_the_folder_of_a_comparison_that_runs_is_not_deleted(tmp_path, scores):
    folder = tmp_path / "over"
    folder.mkdir()
    run_folder.mark(folder, "lm")
    with run_folder.hold(folder), pytest.raises(RunInUse):
        lm_over_trl.compare(tmp_path / "run", folder, [], [])
    assert folder.is_dir()


def test_trls_side_does_not_outlive_a_benchmark_that_is_killed(tmp_path):
    """A later one would delete its folder under it, and train beside it."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    sleeper.chmod(0o755)
    code = (
        "from dataclasses import replace; from pathlib import Path; from tests.bench import lm_over_trl as m;"
        f"m.TRL = replace(m.TRL, python={str(sleeper)!r}); m.run_trl([], [], Path({str(tmp_path)!r}) / 'trl', 1.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as bench:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), 60)
        bench.kill()
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), 30)


def test_trls_side_has_the_cores_of_the_run(tmp_path, monkeypatch):
    """It trained on all that there were."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntaskset -cp $$ > {tmp_path}/cores\n")
    python.chmod(0o755)
    monkeypatch.setattr(lm_over_trl, "TRL", replace(lm_over_trl.TRL, python=str(python)))
    lm_over_trl.run_trl([], [], tmp_path / "trl", 1.0, {0})
    assert (tmp_path / "cores").read_text().split()[-1] == "0"


def test_a_demo_does_not_outlive_a_benchmark_that_is_killed(tmp_path):
    """It went on with both cores, beside what was measured next."""
    (tmp_path / "make").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    (tmp_path / "make").chmod(0o755)
    code = "from tests.bench.bench_lm import demo; demo(0, [])"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env) as bench:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), 60 * SLOW)
        bench.kill()
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), 30 * SLOW)


def test_figures_of_other_settings_do_not_stay_beside_a_seeds(tmp_path, monkeypatch):
    """Figures of the default stood in the file of another learning rate."""
    monkeypatch.setattr(bench_lm, "FIGURES", tmp_path / "lm.json")
    known = {"overrides": [], "by_seed": {"0": {}}, "over_trl_end_to_end": 5.2}
    bench_lm.FIGURES.write_text(json.dumps(known))
    monkeypatch.setattr(sys, "argv", ["bench_lm", "--learner.lr", "1e-5"])

    def demo(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_lm, "demo", demo)
    with pytest.raises(KeyboardInterrupt):
        bench_lm.main()
    assert not bench_lm.FIGURES.exists()


def test_a_seed_is_made_from_its_beginning(tmp_path, monkeypatch):
    """With the warm start of an interrupted one its minutes were those of a part."""
    monkeypatch.setattr(bench_lm, "FOLDER", tmp_path)
    (tmp_path / "lm-0" / "warm").mkdir(parents=True)
    seen = []

    def make(*_, **__):
        seen.append(list((tmp_path / "lm-0").iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", make)
    with pytest.raises(KeyboardInterrupt):
        bench_lm.demo(0, [])
    assert seen == [[]]


def test_lora_has_its_own_rate_beside_a_setting_for_both(monkeypatch):
    """The rate was given twice, which is refused after the first full run."""
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    for kind in bench_lora.KINDS:
        with pytest.raises(FileNotFoundError):
            bench_lora.run_demo(kind, 99, ["--learner.lr", "1e-4"])
    rates = [[command[i + 1] for i, word in enumerate(command) if word == "--learner.lr"] for command in commands]
    assert rates == [["1e-4"], ["3e-4"]]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
