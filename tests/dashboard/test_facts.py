"""What the page shows of a run, made of its folder."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cusearch_async.config import load_config, shipped_configs
from cusearch_async.dashboard import facts as facts_module
from cusearch_async.dashboard.facts import columns, facts, in_short, rounded
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.dashboard.page import page
from cusearch_async.errors import ConfigError
from cusearch_async.evaluation.scores import record
from cusearch_async.files import append_row
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start, record_stop
from tests.dashboard.conftest import add_step, data_of
from tests.strategies import make_trajectory


def test_curves_are_columns_and_what_is_no_number_is_null():
    rows = [
        {"step": 0, "epoch": 1, "a": 1, "list": [1.0, None, float("nan")]},
        {"step": 1, "epoch": 1, "time": 5.0, "a": float("inf"), "b": "text"},
    ]
    assert columns(rows) == {
        "step": [0, 1],
        "values": {"a": [1.0, None], "b": [None, None], "list": [[1.0, None, None], None]},
    }
    assert rounded(0.123456789) == 0.123457
    assert rounded(True) is None


def test_a_long_run_is_thinned_to_its_first_and_last_step_and_some_between(monkeypatch):
    monkeypatch.setattr(facts_module, "MOST_POINTS", 5)
    rows = [{"step": step, "epoch": 1} for step in range(101)]
    assert columns(rows)["step"] == [0, 25, 50, 75, 100]
    assert columns(rows[:5])["step"] == [0, 1, 2, 3, 4]


def test_the_facts_of_a_run(config):
    for step in range(3):
        add_step(config, step)
    found = facts(KeptRun.read(config.folder))
    assert found["about"]["method"] == "sdga_phase"
    assert found["about"]["said"] == ["short", "a first try"]
    assert found["bounds"]["s_max"] == 5
    assert found["progress"] == {
        "done": 3, "steps": 10, "step_s": 3.0, "outcome": "running or killed", "error": None
    }  # fmt: skip
    assert ["pool.questions", "64"] in found["settings"]
    assert found["alarms"] == []
    record_stop(config.folder, 1, None, "NaN in the gradient")
    assert facts(KeptRun.read(config.folder))["progress"]["error"] == "NaN in the gradient"


def test_an_alarm_has_its_evidence_and_a_command_with_the_runs_folder(config):
    for step, depth in enumerate([3.0, 3.0, 3.0, 0.1, 0.1, 0.1, 0.1]):
        add_step(config, step, **{"depth/mean": depth, "train/loss": math.nan if step == 6 else 0.1})
    alarms = {one["name"]: one for one in facts(KeptRun.read(config.folder))["alarms"]}
    assert alarms["stops_searching"]["firing"]
    assert "searches an episode" in alarms["stops_searching"]["evidence"]
    assert alarms["stops_searching"]["look"] == f"cusearch trace {config.folder} --step 6"


def test_alarms_that_are_over_are_counted_and_the_newest_shown(config):
    """Of 35 the page said that there were 20."""
    for step in range(60):
        add_step(config, step, **{"train/grad_norm": 99.0 if step % 10 == 0 else 0.1})
    found = facts(KeptRun.read(config.folder))
    over = [one for one in found["alarms"] if not one["firing"]]
    assert (len(over), found["alarms_over"]) == (3, 6)


def test_a_demo_shows_its_scorings_and_an_evaluator_its_versions(config):
    def scored(em: float) -> dict[str, Any]:
        return {"count": 2, "em": em, "em_interval": [0.0, 1.0], "depth": 1.0}

    for step in range(3):
        add_step(config, step)
    for side, em in (("before", 0.0), ("after", 0.5)):
        each = [{"question_id": "a", "em": em, "depth": 2}, {"question_id": "b", "em": 0.0, "depth": 0}]
        found = {"scores": {"all": scored(em)}, "questions": each, "conditions": {"model": "a/step000002-e1/model"}}
        (config.folder / f"eval_{side}.json").write_text(json.dumps(found))
    before, after = facts(KeptRun.read(config.folder))["scores"]
    assert (before["step"], after["step"]) == (0, 2), "that of the checkpoint, though the run was continued"
    assert before["each"] == {"ids": 0, "right": [0.0, 0.0], "depth": [2, 0]}
    assert after["categories"]["all"]["em"] == 0.5
    append_row(config.folder / "eval.jsonl", {"step": 2, "epoch": 1, "seconds": 1.0, "all": scored(0.25)})
    (version,) = facts(KeptRun.read(config.folder))["scores"]
    assert version["what"] == "version 2"
    assert version["each"]["right"] == []


def test_two_versions_tell_which_questions_became_right_with_how_many_searches(config):
    for version, em in ((0, (0.0, 1.0)), (5, (1.0, 0.0))):
        episodes = [make_trajectory(n, 0, em=one, depth=n + 1, question_id=f"q{n}") for n, one in enumerate(em)]
        record(config.folder, version, f"v{version:06d}-e1", 1.0, {}, episodes)
    found = facts(KeptRun.read(config.folder))
    first, second = (score["each"] for score in found["scores"])
    assert found["questions"] == [["q0", "q1"]], "once for all versions"
    assert first == {"ids": 0, "right": [0, 1], "depth": [1, 2]}
    assert second == {"ids": 0, "right": [1, 0], "depth": [1, 2]}


def test_of_many_scored_versions_some_are_shown_and_the_last(config, monkeypatch):
    """All questions of all of them were made again every two seconds, for every browser."""
    monkeypatch.setattr(facts_module, "MOST_SCORED", 3)
    for version in range(9):
        record(config.folder, version, f"v{version:06d}-e1", 1.0, {}, [make_trajectory(0, 0, question_id="q")])
    assert [score["step"] for score in facts(KeptRun.read(config.folder))["scores"]] == [0, 4, 8]


def test_keys_in_the_hooks_of_alarms_are_not_on_a_page(atlas_config, tmp_path, monkeypatch):
    """A page may be sent; trackers leave these out, too."""
    hooks = ["--alarms.command", "['curl', '-H', 'Bearer SECRET']", "--alarms.url=https://hooks.example.com/SECRET"]
    config = load_config(atlas_config, ["--run.folder", str(tmp_path / "run"), *hooks])
    run_folder.mark(config.folder, config.run.name)
    monkeypatch.setattr("sys.argv", ["cusearch", "launch", *hooks, "--run.steps", "3"])
    record_start(config, 1, 0)
    found = facts(KeptRun.read(config.folder))
    assert "SECRET" not in json.dumps(found)
    command = "cusearch launch --alarms.command … --alarms.url=… --run.steps 3"
    assert [start["command"] for start in found["starts"]] == [command]
    assert ["alarms.stop_on", "[]"] in found["settings"]


def test_a_setting_that_is_infinite_is_shown(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path / "demo"), "--learner.grad_clip", "inf"])
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)
    add_step(config, 0)
    found = facts(KeptRun.read(config.folder))
    assert ["learner.grad_clip", "Infinity"] in found["settings"]
    assert data_of(page("t", found))["bounds"]["grad_clip"] is None


def test_the_limits_of_alarms_are_those_of_the_newest_start(config):
    before = KeptRun.read(config.folder)
    assert KeptRun.read(config.folder, before).history is before.history
    text = (config.folder / "config.toml").read_text()
    (config.folder / "config.toml").write_text(text.replace("max_mib = 4096", "max_mib = 8192"))
    after = KeptRun.read(config.folder, before).history
    assert after.limits.buffer_bytes == 2 * before.history.limits.buffer_bytes


def test_without_settings_nothing_is_said_to_be_right(config, tmp_path):
    add_step(config, 0)
    (config.folder / "config.toml").unlink()
    run = KeptRun.read(config.folder)
    assert (facts(run)["alarms"], in_short(run)["firing"]) == (None, None)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("eval_before.json", '{"scores": [], "questions": []}'),
        ("eval_before.json", "[]"),
        ("eval_before.json", '{"scores": {}, "questions": [{"question_id": "a", "em": 1, "depth": NaN}]}'),
        *(
            (
                "eval.jsonl",
                f'{{"step": 1, "epoch": 1, "each": {{"question_id": ["a"], "em": [1], "depth": [{depth}]}}}}\n',
            )
            for depth in ("null", '"x"', "NaN", "1e999", "[]")
        ),
        ("eval.jsonl", '{"step": 1, "epoch": 1, "each": [{"em": 1}, 5], "all": {"count": 1}}\n'),
        ("metrics.jsonl", '{"step": 1, "epoch": 1, "depth/generated": [null, "a"], "time/step_s": "x"}\n'),
    ],
)
def test_a_damaged_file_hides_nothing_else(config, file, text):
    (config.folder / file).write_text(text)
    found = facts(KeptRun.read(config.folder))
    assert found["about"]["method"] == "sdga_phase"
    json.dumps(found, allow_nan=False)
    in_short(KeptRun.read(config.folder))


def test_a_config_that_was_saved_by_an_editor_of_windows_is_read(config):
    path = config.folder / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert KeptRun.read(config.folder).setting("method", "name") == "sdga_phase"


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl"])
def test_a_damaged_folder_is_named_or_shown_without_it(config, file):
    add_step(config, 0)
    (config.folder / file).write_bytes(b'[run\n\x00"\xff')
    if file == "config.toml":
        with pytest.raises(ConfigError, match=r"config.toml cannot be read"):
            KeptRun.read(config.folder)
    else:
        assert facts(KeptRun.read(config.folder))["progress"]["done"] == 0


def test_healthy_runs_of_the_same_world_and_method_are_drawn_behind_the_curves(tmp_path, config):
    def bands(*overrides: str):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        made = load_config([shipped_configs()["atlas-hard"]], [*overrides, "--run.folder", str(folder)])
        run_folder.mark(made.folder, made.run.name)
        record_start(made, 1, 0)
        return facts(KeptRun.read(made.folder))["healthy"]

    found = bands("--method.name", "grpo_full")
    assert len(found["reward/all"]["low"]) == 24
    assert all(low <= high for low, high in zip(found["depth/mean"]["low"], found["depth/mean"]["high"], strict=True))
    assert bands("--run.seed", "9")["train/entropy"] != found["train/entropy"], "of its own method"
    assert bands("--retriever.stochastic", "true", "--learner.cores", "[0]") is not None
    for other in (
        ("--pool.rollouts", "8", "--pool.questions", "12"),
        ("--learner.lr", "1e-3"),
        ("--model.path", "atlas"),
        ("--retriever.topk", "1"),
        ("--method.phase_reserve", "0.5"),
    ):
        assert bands(*other) is None
    assert facts(KeptRun.read(config.folder))["healthy"] is None, "another world"
