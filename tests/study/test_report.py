"""Tables of a study merge, survive on disk, and make a report that hides nothing."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from cusearch_async.cli.study import claimed
from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.study.curves import draw
from cusearch_async.study.report import figures_of, report_of, variants_of, write_report
from cusearch_async.study.running import to_do
from cusearch_async.study.tables import Tables, failed
from tests.study.studies import one_of, plan_of, tables_of

pytestmark = pytest.mark.system  # it draws whole reports


def rows_of(text, heading):
    """The rows of the first table after a heading, by their first cell."""
    table = text.split(heading, 1)[1].split("\n| ", 1)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path)


def test_a_planted_effect_is_found_in_both_environments(plan, tmp_path):
    text = report_of(plan, tables_of(plan))
    for environment in ("stochastic", "not stochastic"):
        section = text.split(f"### {environment}\n")[1]
        found = rows_of(section, "Less grpo_full, EM")
        (row,) = found.values()
        assert row[0] == "3 of 3"
        low, high = map(float, re.search(r"\[(\S+), (\S+)\]", row[1]).groups())
        assert 0.05 < low < 0.2 < high < 0.45
    assert "14 of 14 runs are done, 0 failed; 0.4 hours" in text


def test_runs_of_an_earlier_plan_do_not_count(plan, tmp_path):
    tables = tables_of(plan)
    fewer = plan_of(tmp_path, ("seeds = 3", "seeds = 2"))
    text = report_of(fewer, tables)
    assert "10 of 10 runs are done, 0 failed; 0.3 hours in all. 4 runs in the tables are not of this plan" in text


def test_without_an_effect_there_is_none(plan, tmp_path):
    text = report_of(plan, tables_of(plan, effect=0.0))
    (row,) = rows_of(text.split("### stochastic\n")[1], "Less grpo_full").values()
    assert row[1].startswith("+0.000 [")


def test_a_failed_seed_is_named_and_counted_and_in_no_mean(plan, tmp_path):
    lost = one_of(plan, "sdga_phase", True, 1)
    text = report_of(plan, tables_of(plan, failed=(lost,)))
    assert f"- {lost}: the engine died" in text
    assert "13 of 14 runs are done, 1 failed" in text
    section = text.split("### stochastic\n")[1]
    assert rows_of(section, "![")["sdga_phase"][0] == "2 of 3 (1 failed)"
    (row,) = rows_of(section, "Less grpo_full").values()
    assert row[0] == "2 of 3", "only seeds that both have are compared"


def test_a_seed_is_compared_with_itself(plan, tmp_path):
    """Seeds differ much, and one side lacks the second."""
    tables = tables_of(plan, failed=(one_of(plan, "sdga_phase", True, 1),), noise=0.2)
    last = tables.answers[tables.answers["version"] == 4].groupby("run")["em"].mean()
    found = [last[one_of(plan, "sdga_phase", True, s)] - last[one_of(plan, "grpo_full", True, s)] for s in (0, 2)]
    text = report_of(plan, tables)
    (row,) = rows_of(text.split("### stochastic\n")[1], "Less grpo_full").values()
    assert float(row[1].split(" [")[0]) == pytest.approx(sum(found) / 2, abs=0.001)


def test_a_method_that_failed_with_every_seed_keeps_its_rows_and_its_place_in_holms_correction(tmp_path):
    plan = plan_of(tmp_path, ('"sdga_phase"]\n"retriever', '"sdga_phase", "random"]\n"retriever'))
    lost = tuple(one_of(plan, "random", True, seed) for seed in range(3))
    whole, less = (report_of(plan, tables_of(plan, failed=f)) for f in ((), lost))
    of_whole, of_less = (rows_of(text.split("### stochastic\n")[1], "Less grpo_full") for text in (whole, less))
    assert of_less["random"][:2] == ["0 of 3", "–"]
    assert of_less["sdga_phase"] == of_whole["sdga_phase"]
    assert rows_of(less.split("### stochastic\n")[1], "![")["random"] == ["0 of 3 (3 failed)", *["–"] * 7]


def test_a_study_whose_runs_have_all_failed_has_a_report(plan, tmp_path):
    text = report_of(plan, tables_of(plan, failed=tuple(plan.runs)))
    assert "0 of 14 runs are done, 14 failed" in text
    assert text.count("the engine died") == 14
    assert "No run is done yet" in text


def test_one_seed_has_no_interval_and_that_is_said(plan, tmp_path):
    kept = [name for name in plan.runs if "-s0-" in name]
    tables = tables_of(plan)
    one = Tables(tables.runs[tables.runs["run"].isin(kept)], tables.steps, tables.answers)
    text = report_of(plan, one)
    rows = rows_of(text.split("### stochastic\n")[1], "![")
    assert set(rows) == {"grpo_full", "sdga_phase"}
    row = rows["grpo_full"]
    assert row[0] == "1 of 3"
    assert row[1].endswith("(no interval)")


def test_a_part_may_have_a_separate_baseline(plan, tmp_path):
    part = plan.parts[1]
    (variants,) = variants_of(part, plan, tables_of(plan)).values()
    assert [(v.name, v.is_baseline) for v in variants] == [("max_staleness 2", True), ("max_staleness 0", False)]
    text = report_of(plan, tables_of(plan))
    assert "Less max_staleness 2, EM after the last step" in text


def test_tables_are_read_as_they_were_written(plan, tmp_path):
    tables = tables_of(plan)
    tables.write(tmp_path)
    again = Tables.read(tmp_path)
    pd.testing.assert_frame_equal(again.runs, tables.runs)
    pd.testing.assert_frame_equal(again.answers, tables.answers, check_dtype=False)
    assert (tmp_path / "runs.csv").read_text().count("\n") == 15


def test_a_run_replaces_its_earlier_row(plan):
    tables = tables_of(plan)
    run = next(iter(plan.runs.values()))
    worse = tables.with_run(failed(run, plan, "no room", 3.0))
    assert worse.statuses[run.id] == "failed"
    assert len(worse.runs) == len(tables.runs)
    assert run.id not in set(worse.answers["run"])


def test_what_is_done_is_not_made_again_and_what_failed_only_on_demand(plan):
    lost = list(plan.runs)[3]
    tables = tables_of(plan, failed=(lost,))
    assert to_do(plan, tables, retry_failed=False) == []
    assert [run.id for run in to_do(plan, tables, retry_failed=True)] == [lost]
    nothing = Tables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame())
    assert len(to_do(plan, nothing, retry_failed=False)) == 14


def test_a_damaged_table_is_refused_by_name(plan, tmp_path):
    (tmp_path / "runs.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ConfigError, match=r"runs\.parquet cannot be read"):
        Tables.read(tmp_path)


def test_the_folder_of_another_study_is_refused(plan, tmp_path):
    folder = tmp_path / "study"
    with claimed(folder, tmp_path / "small.toml", plan):
        pass
    other = plan_of(tmp_path, ('name = "small"', 'name = "other"'))
    with (
        pytest.raises(ConfigError, match="study with the name small, not other"),
        claimed(folder, tmp_path / "small.toml", other),
    ):
        pass
    claim = '\n[[claim]]\ntext = "late"\npart = "methods"\nbetter = { "method.name" = "sdga_phase" }\n'
    later = plan_of(tmp_path, ("[settings]", f"{claim}\n[settings]"))
    with pytest.raises(ConfigError, match="with the claims"), claimed(folder, tmp_path / "small.toml", later):
        pass
    fixed = plan_of(tmp_path, ("[settings]", f"{claim}\n[settings]"))
    with claimed(tmp_path / "with a claim", tmp_path / "small.toml", fixed):
        pass
    fewer = plan_of(tmp_path, ("[settings]", f"{claim}\n[settings]"), ("seeds = 3", "seeds = 2"))
    with (
        pytest.raises(ConfigError, match="with the seeds of claims methods: 3, not methods: 2"),
        claimed(tmp_path / "with a claim", tmp_path / "small.toml", fewer),
    ):
        pass
    late = plan_of(tmp_path, ('configs = ["atlas"]', 'configs = ["atlas"]\nprimary = ["em_last"]'))
    with pytest.raises(ConfigError, match="primary measures"), claimed(folder, tmp_path / "small.toml", late):
        pass


def test_two_studies_do_not_run_in_one_folder(plan, tmp_path):
    folder = tmp_path / "study"
    with (
        claimed(folder, tmp_path / "small.toml", plan),
        pytest.raises(RunInUse),
        claimed(folder, tmp_path / "small.toml", plan),
    ):
        pass


def test_a_study_that_has_just_begun_names_what_it_will_compare(plan, tmp_path):
    """One run is done: what it differs in is known from the plan."""
    tables = tables_of(plan)
    only = next(iter(plan.runs))
    begun = Tables(tables.runs[tables.runs["run"] == only], tables.steps, tables.answers)
    text = report_of(plan, begun)
    assert {name: row[0] for name, row in rows_of(text, "![").items()} == {
        "grpo_full": "1 of 3",
        "sdga_phase": "0 of 3",
    }


def test_what_nothing_is_compared_with_is_named_once(tmp_path):
    """The second part varies what its baseline, the study's, does not name."""
    plan = plan_of(tmp_path, ('baseline = { "pool.max_staleness" = 2 }\n', ""))
    text = report_of(plan, tables_of(plan))
    costs = rows_of(text.split("## staleness")[1], "Mean cost of a run")
    assert sorted(costs) == ["max_staleness 0", "max_staleness 2"]


def test_what_the_report_says_of_depth_staleness_and_cost(plan, tmp_path):
    tables = tables_of(plan)
    deep = tables.answers["question"] % 2
    answers = tables.answers.assign(needed=deep, em=deep * (tables.answers["version"] == 4))
    text = report_of(plan, Tables(tables.runs, tables.steps, answers))
    needed = rows_of(text, "EM after the last step, by searches needed:")
    assert needed == {"grpo_full": ["0.000", "1.000"], "sdga_phase": ["0.000", "1.000"]}
    minibatch = plan.of("methods")[0].config.loss.minibatch
    assert rows_of(text, "Mean cost of a run")["grpo_full"][0] == str(4 * -(-60 // minibatch))
    assert "By search depth" not in text.split("## staleness")[0]
    stale = rows_of(text.split("## staleness")[1], "By search depth: KL")
    assert stale["max_staleness 0"] == ["1.00", "1.000", "–"], "in thousandths; nobody was at the second depth"


BESIDE = (
    '[[part]]\nname = "staleness"',
    '[[part]]\nname = "other"\nseeds = 2\nsettings = { "pool.max_staleness" = 0 }\n',
)


def test_a_part_is_compared_with_the_same_runs_of_another_part(tmp_path):
    """Synchronous runs, beside those of the main part with a stochastic engine; the planted effect is in both."""
    other = BESIDE[1] + 'beside = "methods"\n[part.grid]\n"method.name" = ["grpo_full", "sdga_phase"]\n\n'
    plan = plan_of(tmp_path, (BESIDE[0], other + BESIDE[0]))
    pairs = plan.pairs(plan.parts[1])
    assert len(pairs) == 4
    for name, beside in pairs.items():
        mine, theirs = plan.runs[name].config, plan.runs[beside].config
        assert (mine.method, mine.run.seed) == (theirs.method, theirs.run.seed)
        assert (mine.pool.max_staleness, theirs.pool.max_staleness) == (0, 2)
        assert theirs.retriever.stochastic == mine.retriever.stochastic
    tables = tables_of(plan)
    lifted = tables.answers["run"].isin([name for name in pairs if name.startswith("sdga")])
    better = tables.answers.assign(em=tables.answers["em"].where(~lifted | (tables.answers["version"] < 4), 1))
    text = report_of(plan, Tables(tables.runs, tables.steps, better))
    rows = rows_of(text.split("## other")[1], "Less the same in methods, EM after the last step")
    assert rows["grpo_full"][:2] == ["2 of 2", "+0.000 [+0.000, +0.000]"]
    assert rows["sdga_phase"][0] == "2 of 2"
    assert float(rows["sdga_phase"][1].split(" [")[0]) > 0.2


@pytest.mark.parametrize(
    ("beside", "said"), [("nothing", "beside 'nothing' is no part"), ("fewer", "scored on other held-out questions")]
)
def test_a_part_beside_nothing_or_other_questions_is_refused(tmp_path, beside, said):
    other = BESIDE[1].replace('pool.max_staleness" = 0', 'eval.questions_per_category" = 4')
    fewer = '[[part]]\nname = "fewer"\nseeds = 2\n[part.grid]\n"method.name" = ["grpo_full", "sdga_phase"]\n\n'
    other += f'beside = "{beside}"\n[part.grid]\n"method.name" = ["grpo_full", "sdga_phase"]\n\n'
    with pytest.raises(ConfigError, match=said):
        plan_of(tmp_path, (BESIDE[0], fewer + other + BESIDE[0]))


def test_a_part_beside_several_values_of_its_own_setting_is_refused(tmp_path):
    """It was compared with the last of them, without a word."""
    other = BESIDE[1] + 'beside = "several"\n[part.grid]\n"method.name" = ["grpo_full", "sdga_phase"]\n\n'
    several = '[[part]]\nname = "several"\nseeds = 2\n[part.grid]\n"method.name" = ["grpo_full", "sdga_phase"]\n'
    several += '"pool.max_staleness" = [2, 8]\n\n'
    with pytest.raises(ConfigError, match=r"pool.max_staleness has several values in beside = 'several'; name a part"):
        plan_of(tmp_path, (BESIDE[0], several + other + BESIDE[0]))


def test_shares_are_of_trajectories_not_of_steps(plan):
    """A step that selects few counts as little."""
    tables = tables_of(plan)
    is_first = tables.steps["step"] == 0
    changed = {
        "groups/singleton_share": is_first.astype(float),
        "depth/selected": is_first.map({True: "[10, 0]", False: "[10, 80]"}),
    }
    text = report_of(plan, Tables(tables.runs, tables.steps.assign(**changed), tables.answers))
    steps = tables.steps[tables.steps["run"] == tables.steps["run"].iloc[0]]["step"].nunique()
    share = 10 / (10 + 90 * (steps - 1))
    assert rows_of(text, "Pools, and what was trained of them")["grpo_full"][4] == f"{share:.2f}"


def test_what_the_report_says_of_the_pools(plan, tmp_path):
    tables = tables_of(plan)
    steps = tables.steps.assign(**{"depth/mean": tables.steps["step"] + 1.0, "groups/singleton_share": 0.25})
    text = report_of(plan, Tables(tables.runs, steps, tables.answers))
    row = rows_of(text, "Pools, and what was trained of them")["grpo_full"]
    assert (row[0], row[1], row[4], row[-1]) == ("1.00", "4.00", "0.25", str(round(4 * 60 * (1 - 0.25 - 0.3))))
    assert "weight of those alone" not in text, "these tables have none"
    newer = steps.assign(**{"selection/singleton_mass": 0.4})
    text = report_of(plan, Tables(tables.runs, newer, tables.answers))
    assert rows_of(text, "Pools, and what was trained of them")["grpo_full"][-2] == "0.40"


def test_the_report_compares_runs_that_have_trained_on_as_many_usable_trajectories(plan):
    text = report_of(plan, tables_of(plan)).split("### stochastic\n")[1]
    rows = rows_of(text, "EM at as many usable trajectories")
    assert rows["sdga_phase"] == rows_of(text, "Less grpo_full, EM after the last step")["sdga_phase"], "here all have"


def test_a_report_has_the_figures_that_it_shows_and_none_of_an_earlier_one(plan, tmp_path):
    """Of the part with one context."""
    tables = tables_of(plan)
    runs = [run.id for run in plan.of("staleness")]
    some = Tables(tables.runs[tables.runs["run"].isin(runs)], tables.steps, tables.answers)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "old.png").touch()
    text = write_report(plan, some, tmp_path).read_text()
    shown = re.findall(r"!\[[^]]*\]\(figures/([^)]+)\)", text)
    files = {path.name: path.stat().st_size for path in (tmp_path / "figures").iterdir()}
    assert sorted(shown) == sorted(files)
    assert min(files.values()) > 5000
    assert set(figures_of(plan, tables)) == {
        f"{about}{curve}.png"
        for about in ("methods-stochastic", "methods-not-stochastic", "staleness")
        for curve in ("", "-tokens", "-depth")
    }


def test_a_curve_of_one_seed_and_of_no_baseline_is_drawn(plan, tmp_path):
    tables = tables_of(plan, failed=tuple(one_of(plan, "grpo_full", True, seed) for seed in range(3)))
    kept = tables.runs["seed"] == 0
    curve, variants = figures_of(plan, tables)["methods-stochastic.png"]
    assert [variant.seeds for variant in variants] == ["0 of 3 (3 failed)", "3 of 3"]
    one = Tables(tables.runs[kept], tables.steps, tables.answers)
    for number, found in enumerate((tables, one)):
        curve, variants = figures_of(plan, found)["methods-stochastic.png"]
        draw(curve, variants, found, tmp_path / f"{number}.png")
    assert (tmp_path / "0.png").stat().st_size > (tmp_path / "1.png").stat().st_size > 5000, "without an interval"
