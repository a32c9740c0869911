"""Studies of what people bring: own methods and their settings, paths, prompt templates, values written otherwise than
a config holds them. Hours of runs must not end without a report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.study import report, running, tables
from cusearch_async.study.curves import CURVES
from cusearch_async.study.plan import Plan, read_plan
from cusearch_async.study.report import figures_of, report_of
from cusearch_async.study.variants import Variant, variants_of

BASE = """
[study]
name = "mine"
configs = ["atlas-hard"]
baseline = {{ {baseline} }}
[settings]
"run.steps" = 8
"eval.every" = 8
"eval.in_order" = true
[[part]]
name = "one"
seeds = 1
{settings}
[part.grid]
{grid}
"""
OWN = "docs.examples.methods:FrontierDepth"


def plan_of(folder: Path, grid: str, baseline: str, settings: str = "", more: str = "") -> Plan:
    path = folder / "study.toml"
    path.write_text(BASE.format(grid=grid, baseline=baseline, settings=settings) + more, encoding="utf-8")
    return read_plan(path)


def reported(plan: Plan, folder: Path) -> str:
    """The report, with all runs failed; its tables go through their files."""
    found = tables.Tables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame())
    for run in plan.runs.values():
        found = found.with_run(tables.failed(run, plan, "as the test says", 1.0))
        found.write(folder)
    for name in figures_of(plan, found):
        (folder / name).touch()
    return report_of(plan, tables.Tables.read(folder))


def test_an_own_method_is_run_under_a_name_that_a_run_may_have(tmp_path):
    plan = plan_of(tmp_path, f'"method.name" = ["grpo_full", "{OWN}"]', '"method.name" = "grpo_full"')
    for run in plan.runs.values():
        _, _, _, _, *words = running._command(plan, run, tmp_path / "run")
        count = len(plan.study.configs)
        name = load_config([Path(word) for word in words[:count]], words[count:]).run.name
        assert name.startswith("mine-")
        assert name.endswith(run.id[-8:])
    assert [one.name for one in compared(plan, tmp_path)] == ["grpo_full", OWN]


def with_config(folder: Path, text: str) -> Plan:
    own = folder / "own.toml"
    own.write_text(text)
    path = folder / "mine.toml"
    grid, baseline = '"method.name" = ["grpo_full", "sdga_phase"]', '"method.name" = "grpo_full"'
    base = BASE.format(grid=grid, baseline=baseline, settings="").replace('["atlas-hard"]', f'["atlas-hard", "{own}"]')
    path.write_text(base, encoding="utf-8")
    return read_plan(path)


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000", "http://127.0.0.1:8765"])
def test_a_retriever_elsewhere_is_asked_and_one_here_is_started_for_each_run(tmp_path, url):
    """All runs of a study searched the shipped atlas instead of the user's own corpus."""
    plan = with_config(tmp_path, f'[retriever]\nurl = "{url}"\n')
    words = [running._command(plan, run, tmp_path / "run") for run in plan.runs.values()]
    assert ["--retriever.url" in each for each in words] == ["127" in url] * 2


def test_places_of_a_config_have_one_for_each_run(tmp_path):
    """The second run was refused in the first one's weights.folder, and another study with the same run deleted it."""
    places = {"weights.folder": f"{tmp_path}/shm", "learner.checkpoint_objects": "s3://bucket/study/"}
    plan = with_config(
        tmp_path, f'[weights]\nfolder = "{tmp_path}/shm"\n[learner]\ncheckpoint_objects = "s3://bucket/study/"\n'
    )
    for run in plan.runs.values():
        words = running._command(plan, run, tmp_path / "run")
        for key, place in places.items():
            own = words[words.index(f"--{key}") + 1]
            assert own.startswith(f"{place.rstrip('/')}/{plan.study.name}-{run.id}-")
            assert own != running.places_of(plan, run, tmp_path / "elsewhere")[key], "of the same study elsewhere"
        weights = Path(words[words.index("--weights.folder") + 1])
        weights.mkdir(parents=True)
        running._remove(tmp_path / "run", plan, run)
        assert not weights.exists()


def test_the_figures_of_two_parts_have_two_names(tmp_path):
    """The part `a-depth` had the name of a curve of the part `a`."""
    names = [report._figure(part, "", curve) for part in parts_named("a", "a-depth", "a.b-tokens") for curve in CURVES]
    assert len({*names}) == len(names)
    assert names[:3] == [f"a{end}.png" for end in ("", *(f"-{curve.name}" for curve in CURVES[1:]))]


def parts_named(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


def test_a_setting_that_only_own_methods_have_may_differ_between_parts(tmp_path):
    more = (
        '[[part]]\nname = "two"\nseeds = 1\nbaseline = { "method.step_size" = 0.1 }\n'
        f'[part.settings]\n"method.name" = "{OWN}"\n'
    )
    more += '[part.grid]\n"method.step_size" = [0.1, 0.2]\n'
    plan = plan_of(tmp_path, '"method.name" = ["grpo_full", "sdga_phase"]', '"method.name" = "grpo_full"', more=more)
    assert len(plan.runs) == 4
    assert [one.name for one in compared(plan, tmp_path, 1)] == ["step_size 0.1", "step_size 0.2"]
    with pytest.raises(ConfigError, match=r"method\.stepsize: unknown"):
        plan_of(tmp_path, '"method.name" = ["grpo_full", "sdga_phase"]', '"method.stepsize" = 1')


def compared(plan: Plan, folder: Path, part: int = 0) -> list[Variant]:
    reported(plan, folder)
    (found,) = variants_of(plan.parts[part], plan, tables.Tables.read(folder)).values()
    return found


@pytest.mark.parametrize(
    ("key", "values"),
    [("learner.lr", ["1e-6", "2e-6"]), ("model.path", ["~/a", "~/b"]), ("retriever.index", ["index-1", "index-2"])],
)
def test_values_are_found_as_they_were_written(tmp_path, key, values):
    grid = f'"{key}" = ["{values[0]}", "{values[1]}"]'
    plan = plan_of(tmp_path, grid, f'"{key}" = "{values[0]}"', '[part.settings]\n"retriever.corpus" = "c.jsonl"')
    assert len(plan.runs) == 2
    assert [one.is_baseline for one in compared(plan, tmp_path)] == [True, False]


def test_prompt_templates_are_shortened_in_names(tmp_path):
    for name in ("t1.txt", "t2.txt"):
        (tmp_path / name).write_text("You are <a> searcher?\n" * 20 + name + "\n{question}", encoding="utf-8")
    grid = f'"environment.search.template" = ["{tmp_path}/t1.txt", "{tmp_path}/t2.txt"]'
    plan = plan_of(tmp_path, f'"method.name" = ["grpo_full", "sdga_phase"]\n{grid}', '"method.name" = "grpo_full"')
    reported(plan, tmp_path)
    contexts = list(variants_of(plan.parts[0], plan, tables.Tables.read(tmp_path)))
    assert len(set(contexts)) == 2, "and told apart"
    assert all(name.startswith("template You are <a> searcher?") and len(name) < 80 for name in contexts)
    assert len(report._figure(plan.parts[0], "<a>/" * 100, CURVES[0])) < 120
