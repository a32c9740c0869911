"""`cusearch runs`, `replay` and `trace`: what is told of runs that are over."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch
from pyarrow import parquet

from cusearch_async.cli import runs
from cusearch_async.cli.main import make_parser
from cusearch_async.cli.parts import figure
from cusearch_async.cli.runs import differences
from cusearch_async.config import load_config, save_config
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.errors import ConfigError, ReplayDiffers
from cusearch_async.files import append_row
from cusearch_async.lifecycle.entry import split_overrides
from cusearch_async.lifecycle.placement import count_sharers
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import read_starts, record_start, record_stop
from cusearch_async.run.identity import DATA, Identity
from cusearch_async.run.provenance import computing
from cusearch_async.training.recorder import Recorder
from cusearch_async.training.selector import Selector, initial_method_state
from cusearch_async.types import Pool
from tests.conftest import SLOW
from tests.dashboard.test_page import data_of
from tests.fakes import STARTER
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS

SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")


def cusearch(capsys, *words):
    """What a command prints."""
    own, overrides = split_overrides(words)
    arguments = make_parser(words).parse_args(own)
    arguments.run(arguments, overrides)
    return capsys.readouterr().out


@pytest.fixture
def make_run(atlas_config, tmp_path):
    def make(name, *overrides, steps=10, em=0.5, data="9 (a)"):
        folder = tmp_path / "runs" / name
        config = load_config(atlas_config, [*SMALL, "--run.folder", str(folder), "--run.steps", "10", *overrides])
        run_folder.mark(folder, config.run.name)
        record_start(config, 1, 0, Identity({DATA: data}))
        for step in range(steps):
            row = {"step": step, "epoch": 1, "reward/em": em, "reward/all": 0.6, "depth/mean": 2.0}
            append_row(folder / "metrics.jsonl", row | {"staleness/mean": 1.5})
        return config

    return make


def test_the_runs_of_a_folder_are_listed_with_how_they_ended(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    record_stop(make_run("done").folder, 1, 10, "finished")
    record_stop(make_run("broken", steps=3).folder, 1, None, "NaN in the gradient")
    make_run("killed", "--method.name", "random", steps=4, em=0.25)
    (tmp_path / "runs" / "notes").mkdir()
    said = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs")).splitlines()
    lines = {line.split()[0]: line for line in said[1:-1]}
    assert set(lines) == {"done", "broken", "killed"}
    assert "10/10" in lines["done"]
    assert " finished " in lines["done"]
    assert "3/10" in lines["broken"]
    assert "failed" in lines["broken"]
    assert said[-1] == "broken failed: NaN in the gradient"
    assert "random" in lines["killed"]
    assert "0.25" in lines["killed"]
    assert "running or killed" in lines["killed"]


GARBAGE = '[run\n\x00"\xff'


def test_a_warm_start_is_listed_as_one(tmp_path, capsys):
    for name, steps in (("warm", 3), ("fork", 0)):
        run_folder.mark(tmp_path / "runs" / name, name)
        for step in range(steps):
            append_row(tmp_path / "runs" / name / "metrics.jsonl", {"step": step, "epoch": 1, "loss": 0.5})
    _, fork, warm = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs")).splitlines()
    assert fork.startswith("fork ")
    assert fork.rstrip().endswith(" not started")
    assert warm.rstrip().endswith(" warm start")
    assert " 3/" in warm


def test_runs_are_found_by_their_tags(make_run, tmp_path, capsys):
    make_run("one", "--run.tags", '["short", "lr"]')
    make_run("other", "--run.tags", "long")
    make_run("none")
    listed = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs"), "--tag", "lr")
    assert "one" in listed
    assert not any(name in listed for name in ("other", "none"))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.toml", GARBAGE, "config.toml is not valid TOML"),
        ("config.toml", 'run = 5\nmethod = "x"', "finished"),
        ("run.json", GARBAGE, "run.json cannot be read"),
        ("metrics.jsonl", '{"step": 0, "epoch": 1}\n', "finished"),
    ],
)
def test_a_damaged_run_is_listed_with_its_error_and_hides_no_other(
    make_run, tmp_path, capsys, monkeypatch, file, content, said
):
    monkeypatch.setenv("COLUMNS", "400")
    for name in ("broken", "whole"):
        record_stop(make_run(name).folder, 1, 10, "finished")
    (tmp_path / "runs" / "broken" / file).write_text(content)
    shown = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs"))
    lines = {line.split()[0]: line for line in reversed(shown.splitlines()[1:])}
    assert said in "".join(line for line in shown.splitlines() if line.startswith("broken"))
    assert "10/10" in lines["whole"]


def test_a_start_without_a_time_hides_no_run(make_run, tmp_path, capsys):
    (start,) = (make_run("broken").folder / "starts").glob("*.json")
    start.write_text(re.sub(r'"time": ?"[^"]*"', '"time":""', start.read_text()))
    make_run("whole")
    _, broken, whole = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs")).splitlines()
    assert (broken.split()[0], whole.split()[0]) == ("broken", "whole")


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_list_of_runs_has_one_line_a_run_and_one_an_error(make_run, tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    why = "the update of step 3 contains NaN or infinity in 12 of 340 parameters; lower learner.lr"
    record_stop(make_run("broken", steps=3).folder, 1, None, why)
    record_stop(
        make_run("a_name_that_is_much_longer_than_others", "--method.name", "topk_reward").folder, 1, 10, "finished"
    )
    header, first, second, error = cusearch(capsys, "runs", "--folder", str(tmp_path / "runs")).splitlines()
    assert max(map(len, (header, first, second))) <= int(columns)
    assert error == f"broken failed: {why}"
    assert ("code" in header) == (columns == "200")
    assert re.search(r"\d\d-\d\d \d\d:\d\d topk_reward +10/10 0.50 +– +2.00 finished", first), (
        "whole, whatever the name is"
    )


def test_a_run_that_trained_on_nothing_is_not_listed_like_any_other(make_run, tmp_path, capsys):
    config = make_run("empty", steps=0)
    for step in range(10):
        append_row(config.folder / "metrics.jsonl", {"step": step, "epoch": 1, "depth/selected": [0, 0, 0]})
    record_stop(config.folder, 1, 10, "finished")
    assert "finished, 0 trained" in cusearch(capsys, "runs", "--folder", str(tmp_path / "runs"))


def test_the_list_of_runs_has_what_the_demo_scored(make_run, tmp_path, capsys):
    record_stop(make_run("demo").folder, 1, 10, "finished")
    (tmp_path / "runs" / "demo" / "summary.json").write_text('{"em_after": 0.923}')
    assert " 0.92 " in cusearch(capsys, "runs", "--folder", str(tmp_path / "runs"))


@pytest.mark.system  # it draws
def test_two_runs_differ_in_settings_data_and_figures(make_run, tmp_path, capsys):
    one = make_run("one")
    other = make_run("other", "--learner.lr", "1e-4", "--method.name", "random", em=0.75, data="9 (b)")
    picture = tmp_path / "compare.png"
    said = cusearch(capsys, "runs", "compare", str(one.folder), str(other.folder), "--output", str(picture))
    assert "learner.lr: 5e-05 -> 0.0001" in said
    assert "method.name: 'sdga_phase' -> 'random'" in said
    assert "content of data.source: 9 (a) -> 9 (b)" in said
    assert "0.500" in said
    assert "0.750" in said
    assert "means of steps 8 to 9" in said
    assert picture.stat().st_size > 5000


@pytest.mark.system  # it draws
def test_runs_are_compared_at_the_newest_version_that_all_have_scored(make_run, capsys, tmp_path):
    """Before, one run's version 24 was shown beside the other's version 8."""
    one, other = make_run("one"), make_run("other")
    for run, scores in ((one, {8: 0.3, 16: 0.4, 24: 0.9}), (other, {4: 0.1, 8: 0.5})):
        for version, em in scores.items():
            append_row(run.folder / "eval.jsonl", {"step": version, "epoch": 1, "all": {"em": em}})
    words = ["runs", "compare", str(one.folder), str(other.folder), "--output", str(tmp_path / "c.png")]
    said = cusearch(capsys, *words)
    assert re.search(r"EM, held-out, version 8[\s│]+0\.300[\s│]+0\.500", said)
    (other.folder / "eval.jsonl").write_text('{"step": 9, "epoch": 1, "all": {"em": 0.5}}\n')
    assert re.search(
        r"EM, held-out, last[\s│]+0\.900 \(version 24\)[\s│]+0\.500 \(version 9\)", cusearch(capsys, *words)
    )


@pytest.mark.system  # it draws
def test_rewards_outside_of_0_to_1_are_in_the_picture(monkeypatch):
    limits = {}
    monkeypatch.setattr(figure, "_finish", lambda panel, title, unit, limit: limits.update({title: limit}))
    for reward, limit in ((0.5, (0, 1.02)), (5.0, None), (-3.0, None)):
        figure.draw([{"step": 0, "reward/all": reward}], "", io.BytesIO())
        assert limits["Reward and exact match (sampled)"] == limit


@pytest.mark.system  # it draws
def test_a_comparison_draws_what_was_scored_on_held_out_questions(make_run, tmp_path, capsys, monkeypatch):
    one, other = make_run("one"), make_run("other")
    for version, em in ((0, 0.25), (10, 0.75)):
        append_row(one.folder / "eval.jsonl", {"step": version, "epoch": 1, "all": {"em": em}})
    drawn = []
    monkeypatch.setattr(runs, "draw_together", lambda rows, held_out, path: drawn.append(held_out))
    words = ["runs", "compare", str(one.folder), str(other.folder), "--output", str(tmp_path / "pictures" / "c.png")]
    cusearch(capsys, *words)
    assert drawn == [{str(one.folder): [(0, 0.25), (10, 0.75)], str(other.folder): []}]
    monkeypatch.undo()
    cusearch(capsys, *words)
    assert (tmp_path / "pictures" / "c.png").stat().st_size > 5000, "in a folder that was not there"


def differences_of(*folders):
    """What `compare` says of them, without its plot."""
    return differences(*map(KeptRun.read, folders))


def test_equal_runs_have_no_difference(make_run):
    one, other = (make_run(name).folder for name in ("one", "other"))
    assert differences_of(one, other) == [f"run.folder: '{one}' -> '{other}'"]


def test_a_model_with_other_weights_is_another_model(make_run, tmp_path):
    """With the same config and tokenizer, which are all that the contract has of it."""
    runs = []
    for name in ("one", "other"):
        shutil.copytree(STARTER, tmp_path / "models" / name)
        runs.append(tmp_path / "runs" / name)
    weights = tmp_path / "models" / "other" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    for folder in runs:
        make_run(folder.name, "--model.path", str(tmp_path / "models" / folder.name))
    said = "\n".join(differences_of(*runs))
    assert "weights of model.path: " in said
    assert "content of model.path" not in said


def test_runs_of_one_model_have_the_same_weights_and_those_that_were_not_read_do_not_say_so(make_run):
    runs = [make_run(name).folder for name in ("one", "other")]
    assert "weights of model.path" not in "\n".join(differences_of(*runs))
    for folder in runs:
        path = folder / "starts" / "0001.json"
        start = json.loads(path.read_text())
        path.write_text(json.dumps(start | {"weights": ""}))
    assert "weights of model.path: not recorded by either run" in differences_of(*runs)


def test_a_comparison_needs_runs_with_a_step(make_run, capsys):
    one, empty = make_run("one"), make_run("empty", steps=0)
    with pytest.raises(ConfigError, match="holds no step yet"):
        cusearch(capsys, "runs", "compare", str(one.folder), str(empty.folder))


def test_a_start_says_on_which_machine(make_run):
    (start,) = read_starts(make_run("one").folder)
    assert start.machine["cores"] >= 1
    assert start.machine["memory_mib"] > 100
    assert start.machine["processor"]
    assert (start.computing.ranks, start.computing.threads) == (1, torch.get_num_threads())
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    assert start.computing.device == (torch.cuda.get_device_name() if torch.cuda.is_available() else cpu)


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a GPU")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="named after the instructions of x86-64")
def test_a_start_says_with_which_vector_instructions_a_cpu_computes():
    """With others the last bits of an update differ, and the names of two processors may be the same."""
    command = [sys.executable, "-c", "from cusearch_async.run.provenance import computing; print(computing(1).device)"]
    here = computing(1).device
    fewest = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=fewest).stdout.strip()
    assert (here != there, there) == (True, "cpu DEFAULT")


@pytest.fixture
async def recorded(make_run):
    config = make_run("one")
    await record(config)
    return config


async def record(config):
    """Step 0 of a run."""
    depths = [1, 3, 2, 1, 1, 5, 0, 1]
    pool = Pool(0, tuple(make_trajectory(i // 2, i % 2, depth=d, reward=i / 8) for i, d in enumerate(depths)))
    selector = Selector(config, QUESTIONS, initial_method_state(config.method, config.episode.s_max))
    async with Recorder(config.folder, config.run.records_mib, 1) as recorder:
        recorder.write(selector.choose(pool))
        await recorder.finish()


def test_a_step_is_replayed_and_another_method_is_compared(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    said = cusearch(capsys, "replay", str(recorded.folder), "--step", "0", "--method", "sdga_anti")
    assert "identical, bit for bit" in said
    (row,) = [line for line in said.splitlines() if "of the recorded ones" in line]
    assert [word for word in row.split() if word.isdigit()][:2] == ["4", "4"]
    by_depth = [line.split()[3:] for line in said.splitlines() if line.strip().startswith("of depth")]
    assert [row[0] for row in by_depth] == ["1", "4", "1", "1", "0", "1"]
    assert [row[-1] for row in by_depth] == ["1", "3", "0", "0", "0", "0"]


async def test_another_method_does_not_get_the_settings_of_a_users_own(make_run, capsys, monkeypatch):
    """`method.step_size: unknown key` would be no help to a user who has not given it."""
    monkeypatch.setenv("COLUMNS", "160")
    config = make_run("own", "--method.name", "docs.examples.methods:FrontierDepth", "--method.step_size", "0.5")
    await record(config)
    words = ["replay", str(config.folder), "--step", "0"]
    said = cusearch(capsys, *words, "--method", "sdga_anti")
    assert "sdga_anti" in said
    assert "identical, bit for bit" in said
    assert "identical, bit for bit" in cusearch(capsys, *words, "--method.step_size", "1.0")
    with pytest.raises(ConfigError, match=r"method\.window: unknown key"):
        cusearch(capsys, *words, "--method", "sdga_anti", "--method.window", "3")


REPLAY = """
import sys
import types
import cusearch_async.config
assert "torch" not in sys.modules
class Learner:
    def __init__(self, config, ranks):
        import torch
        print("threads", torch.get_num_threads())
    def update(self, selected, advantages, step):
        return {"train/loss": 0.5}
sys.modules["cusearch_async.learner.learner"] = types.SimpleNamespace(DeepSpeedLearner=Learner)
from cusearch_async.cli.main import main
main()
"""


def replay_update(folder):
    """What `cusearch replay --update` prints in a separate process, with a learner that prints how many threads it
    has and has a loss of 0.5."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", REPLAY, "replay", str(folder), "--step", "0", "--update"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60 * SLOW)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.system
def test_an_update_is_made_again_with_as_many_threads_as_the_learner_had(recorded):
    """As its start says. What still differs is named where the update does."""
    start = recorded.folder / "starts" / "0001.json"
    made = json.loads(start.read_text())
    start.write_text(json.dumps({**made, "computing": {"ranks": 1, "threads": 3, "device": "abacus"}}))
    append_row(recorded.folder / "metrics.jsonl", {"step": 0, "epoch": 1, "train/loss": 0.75})
    status, said = replay_update(recorded.folder)
    assert "threads 3\n" in said
    assert status == 1
    assert "the update of step 0 is not what it was: train/loss: 0.75 -> 0.5; it was made with other than now:" in said
    assert "computing.device: 'abacus' -> '" in said
    assert "computing.threads" not in said


@pytest.mark.system
@pytest.mark.parametrize("cores", ["[0]", "[]"])
def test_without_a_start_that_can_be_read_the_threads_are_those_of_its_settings(recorded, cores):
    """One for each of its cores, or for its share of the machine: torch must not be loaded before."""
    start, settings = (recorded.folder / "starts" / f"0001.{kind}" for kind in ("json", "toml"))
    made = json.loads(start.read_text())
    del made["computing"]
    start.write_text(json.dumps(made))
    config = load_config(settings, ["--learner.cores", cores, "--rollout.cores", "[]"])
    save_config(config, settings)
    threads = 1 if config.learner.cores else max(1, len(os.sched_getaffinity(0)) // count_sharers(config))
    append_row(recorded.folder / "metrics.jsonl", {"step": 0, "epoch": 1, "train/loss": 0.5})
    status, said = replay_update(recorded.folder)
    assert status == 0, said
    assert f"threads {threads}\n" in said
    assert "update: 1 of 1 metrics are identical; version 1 is not kept" in said


def test_a_step_that_would_be_chosen_otherwise_is_told(recorded, capsys):
    settings = recorded.folder / "starts" / "0001.toml"
    settings.write_text(settings.read_text().replace('singleton = "raw"', 'singleton = "zero"'))
    with pytest.raises(ReplayDiffers, match="step 0 was not chosen as it would be now"):
        cusearch(capsys, "replay", str(recorded.folder), "--step", "0")


def test_the_page_of_a_step_has_its_groups_with_their_advantages(recorded, capsys):
    cusearch(capsys, "trace", str(recorded.folder), "--step", "0")
    page = (recorded.folder / "traces" / "000000.html").read_text()
    assert [path.suffix for path in (recorded.folder / "records").iterdir()] == [".zz"], "the pages are not counted"
    data = data_of(page)
    groups = data["groups"]["groups"]
    advantages = [[one["advantage"] for one in group["episodes"]] for group in groups]
    assert len(groups) == 4
    taught = [sum(abs(a or 0.0) for a in of_group) for of_group in advantages]
    assert taught == sorted(taught, reverse=True), "first those that taught most"
    assert [a is None for of_group in advantages for a in of_group].count(True) == 4, "not selected"
    assert "sdga_phase" in page
    assert [row[0] for row in data["table"]][:2] == ["depth", "0"]


def test_figures_are_exported_as_a_table_with_a_row_for_each(make_run, tmp_path, capsys):
    config = make_run("one", steps=2)
    append_row(config.folder / "metrics.jsonl", {"step": 2, "epoch": 1, "depth/generated": [3, None, 1]})
    append_row(
        config.folder / "eval.jsonl", {"step": 2, "epoch": 1, "all": {"count": 9, "em": 0.5, "em_interval": [0, 1]}}
    )
    output = tmp_path / "figures.parquet"
    cusearch(
        capsys, "runs", "export", str(config.folder), str(make_run("two", steps=1).folder), "--output", str(output)
    )
    rows = [tuple(row.values()) for row in parquet.read_table(output).to_pylist()]
    assert ("one", 1, "reward/em", None, 0.5) in rows
    assert [row for row in rows if row[2] == "depth/generated"] == [
        ("one", 2, "depth/generated", 0, 3.0),
        ("one", 2, "depth/generated", 2, 1.0),
    ]
    assert ("one", 2, "eval/all/em", None, 0.5) in rows
    assert {row[0] for row in rows} == {"one", "two"}
    with pytest.raises(ConfigError, match=r"--output must be a .parquet file"):
        cusearch(capsys, "runs", "export", str(config.folder), "--output", "figures.csv")


def test_runs_whose_folders_have_the_same_name_are_told_apart(make_run, tmp_path, capsys):
    """Copied from two hosts: any average by run was of both."""
    folders = [make_run("one", steps=1).folder]
    folders.append(tmp_path / "elsewhere" / folders[0].name)
    shutil.copytree(folders[0], folders[1])
    output = tmp_path / "figures.parquet"
    cusearch(capsys, "runs", "export", *map(str, folders), "--output", str(output))
    assert {row["run"] for row in parquet.read_table(output).to_pylist()} == {"one", "one-2"}


def test_a_step_without_a_record_is_told(make_run, capsys):
    with pytest.raises(ConfigError, match="has no record of step 4; it has none"):
        cusearch(capsys, "trace", str(make_run("one").folder), "--step", "4")
