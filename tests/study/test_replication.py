"""docs/replication.md and its report say what the committed tables say.

`python -m tests.study.test_replication` writes the page's table."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xxhash

from cusearch_async.algorithm.methods.sdga import is_phase_trapped
from cusearch_async.study.plan import read_file, read_plan
from cusearch_async.study.report import figures_of, report_of
from cusearch_async.study.tables import Tables
from cusearch_async.study.variants import usable_of

pytestmark = pytest.mark.system  # it draws a whole report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "replication"
STUDIES = {"replication": FOLDER, "depth-first-lm": FOLDER / "depth-first-lm"}
PAGE = ROOT / "docs" / "replication.md"
MIDDLE = range(9, 16)
"""Learner steps in the middle of the training."""


def file_of(study):
    return ROOT / "cusearch_async" / "configs" / "studies" / f"{study}.toml"


@cache
def planned(study="replication"):
    return read_plan(file_of(study))


@pytest.fixture(scope="module")
def tables():
    return Tables.read(FOLDER)


@pytest.fixture(scope="module")
def steps(tables):
    """Of the main part's runs with a stochastic engine."""
    runs = tables.runs[tables.runs["parts"].str.contains("methods") & tables.runs["retriever.stochastic"]]
    return tables.steps.merge(runs[["run", "method.name"]], on="run")


@pytest.mark.parametrize(("study", "folder"), STUDIES.items(), ids=STUDIES)
def test_the_report_is_that_of_the_tables(study, folder):
    plan, tables = planned(study), Tables.read(folder)
    assert (folder / "report.md").read_text(encoding="utf-8") == report_of(plan, tables)
    assert {path.name for path in folder.glob("figures/*")} == set(figures_of(plan, tables))


def checksum(*what):
    return xxhash.xxh3_64_hexdigest(json.dumps(what, sort_keys=True).encode())


@pytest.mark.parametrize(
    ("study", "of_claims", "of_runs"),
    [
        ("replication", "61d9b55a04029aab", "cf24af4abcd77a7f"),
        ("depth-first-lm", "991915f17b94574f", "f4aa58f6ad656246"),
    ],
)
def test_measures_claims_and_runs_are_those_that_were_fixed(study, of_claims, of_runs):
    """With the checksums of what stood in the file before the first run."""
    file = read_file(file_of(study))
    claims = [claim.model_dump(mode="json", exclude={"reported"}) for claim in file.claim]
    assert checksum(file.study.primary, claims) == of_claims
    parts = [part.model_dump(mode="json", include={"name", "seeds", "settings", "grid"}) for part in file.part]
    assert checksum(file.settings, parts) == of_runs
    assert read_file(STUDIES[study] / "study.toml") == file


MEASURES = ["EM at the end", "mean EM"]
METHODS = ["method", *MEASURES, "thousand tokens", "alone", "flat", "usable", "EM at as many usable"]


def methods_table():
    """A row for each method of the main part with the stochastic engine, from the report: both primary measures,
    thousands of tokens trained on, the shares of trajectories that are alone in their group or in one of equal rewards,
    how many have a group-relative advantage, and EM at as many usable, minus GRPO-Full's."""
    report = (FOLDER / "report.md").read_text(encoding="utf-8").split("\n## methods\n")[1].split("\n## ")[0]
    text = re.split(r"\n### .*\n", report)[1]
    pools, costs = cells_of(text, "depth at first"), cells_of(text, "optimizer steps")
    less = cells_of(text.split("EM at as many usable")[1], "seeds | difference")
    rows = []
    for name, cells in cells_of(text, "seeds | EM after the last").items():
        usable = [pools[name][4], pools[name][5], pools[name][-1], less.get(name, ["", "–"])[1]]
        rows.append([name, *cells[1:3], costs[name][4], *usable])
    return "".join(f"| {' | '.join(row)} |\n" for row in [METHODS, ["---"] * len(METHODS), *rows])


def runs_done():
    """As `124 of 214 runs are done, 0 failed; 7.3 hours in all.`"""
    return re.findall(
        r"^\d+ of \d+ runs are done.*? in all\.", (FOLDER / "report.md").read_text(encoding="utf-8"), re.M
    )[0]


def cells_of(text, header):
    """The rows of the table whose header begins so: name -> the other cells."""
    rows = text.split(f"|  | {header}")[1].split("\n\n")[0].splitlines()[2:]
    split = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: row[1:] for row in split}


def test_the_page_has_the_table_of_its_report():
    text = PAGE.read_text(encoding="utf-8")
    assert methods_table() in text
    assert runs_done() in " ".join(text.split())


def test_what_the_pages_quote_is_in_the_report():
    """Each effect such as +0.005 [-0.010, +0.020], wherever a line breaks it."""
    known = "".join((folder / "report.md").read_text(encoding="utf-8") for folder in STUDIES.values())
    quoted = []
    for page in (PAGE, ROOT / "README.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        quoted += re.findall(r"[+-]\d\.\d{3} (?:\[[^\]]+\]|\(no interval\))", text)
    assert [effect for effect in quoted if effect not in known] == []
    assert len(quoted) > 20


def usable_runs(tables):
    """The main part's runs, by run: method, engine, and of what they trained on the usable trajectories and by how much
    deeper than its pool it was."""
    plan = planned()
    rows = {}
    for run in plan.of("methods"):
        steps = tables.steps_of(run)
        deeper = (steps["depth/mean_trained"] - steps["depth/mean"]).mean()
        rows[run.id] = [run.config.method.name, run.config.retriever.stochastic, usable_of(run, tables).sum(), deeper]
    found = pd.DataFrame.from_dict(rows, orient="index", columns=["method", "stochastic", "usable", "deeper"])
    return found.join(tables.runs.set_index("run")[["trained", "em_area"]])


def test_what_the_page_says_of_usable_trajectories(tables):
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    runs = usable_runs(tables)
    means = runs[runs["stochastic"]].groupby("method")[["trained", "usable"]].mean().round().astype(int)
    for method, text in (
        ("sdga_phase", "of the {trained:,} trajectories that it trains on {usable:,} have"),
        ("grpo_full", "of GRPO-Full's {trained:,} {usable:,} (stochastic engine)"),
        ("grpo_half", "of GRPO-Half's {trained:,} they are {usable:,}."),
        ("random_siblings", "of {trained:,} siblings {usable:,} have a group-relative advantage"),
    ):
        assert text.format(**means.loc[method]) in page
    compared = runs[
        runs["stochastic"] & (runs["trained"] == means.loc["sdga_phase", "trained"]) & (runs["method"] != "topk_reward")
    ]
    known = np.column_stack([np.ones(len(compared)), np.log(compared["usable"]), compared["deeper"]])
    em = compared["em_area"].to_numpy()
    slopes, *_ = np.linalg.lstsq(known, em)
    rest = em - known @ slopes
    errors = np.sqrt(np.diag(np.linalg.inv(known.T @ known)) * (rest @ rest) / (len(em) - 3))
    explained = 1 - rest.var() / em.var()
    assert (
        f"Over the {len(em)} runs of the methods that train on 1,152 trajectories (stochastic engine, without Top-K "
        f"Reward) mean EM rises by {slopes[1]:.3f} (standard error {errors[1]:.3f}) with each unit of log "
        f"usable trajectories, and by {slopes[2]:.3f} ({errors[2]:.3f}) with each search by which the selected are "
        f"deeper than their pool (R² {explained:.2f})"
    ) in page


def test_what_the_page_says_of_phase_0(tables):
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    plan = planned()
    runs = [run for run in plan.of("methods") if run.config.method.name == "sdga_phase"]
    steps = pd.concat([tables.steps_of(run).sort_values("step").assign(usable=usable_of(run, tables)) for run in runs])
    early = steps[steps["selection/phase"] == 0]
    selected = np.array([json.loads(row) for row in early["depth/selected"]])
    share = selected[:, 1].sum() / selected.sum()
    pools = [json.loads(row) for row in early["depth/generated"]]
    trapped = sum(is_phase_trapped(pool, selected[0].sum(), 0) for pool in pools)
    flat, alone = (early[f"groups/{name}_share"].mean() for name in ("zero_variance", "singleton"))
    for text in (
        f"it takes {share:.0%} of its budget from depth 1".replace("%", " %"),
        f"in these {len(early)} of its {len(steps)} steps {early['usable'].mean():.0f} of {selected[0].sum()} selected",
        f"in {trapped} of them it is [trapped](algorithm.md#the-phase-trap)",
        f"of what SDGA-Phase trains on {100 * flat:.0f} % are flat and {100 * alone:.0f} % alone",
    ):
        assert text in page


def test_what_the_page_says_of_alignment():
    """Means over two samples of each pool; intervals of twice the standard error over pools."""
    samples = json.loads((FOLDER / "align-prose.json").read_text(encoding="utf-8"))
    assert [(one["policies"], one["pools"], one["budget"]) for one in samples] == [([0], 60, 24)] * 2
    page = PAGE.read_text(encoding="utf-8")

    def raw(name):
        return np.mean([one["methods"][name]["by_singleton"]["raw"] for one in samples], axis=0)

    def with_interval(values, sign=""):
        return f"{values.mean():{sign}.3f} ± {2 * values.std(ddof=1) / len(values) ** 0.5:.3f}"

    full = raw("grpo_full")
    table = page.split("| minus GRPO-Full's |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert len(rows) == 9
    for name, *cells in rows:
        name = name.replace(" of mixed groups", "/mixed")  # noqa: PLW2901
        counts = (np.mean([one["methods"][name][key] for one in samples]) for key in ("selected", "usable"))
        less = "" if name == "grpo_full" else with_interval(raw(name) - full, "+")
        assert cells == [*(f"{count:.1f}" for count in counts), with_interval(raw(name)), less]
    better = with_interval(raw("sdga_phase/mixed") - raw("random"))
    of_the_filter = with_interval(raw("dapo") - raw("random"))
    said = f"by {better} better than random selection, of which the filter alone (DAPO) has {of_the_filter}"
    assert said in " ".join(page.split())


@pytest.mark.parametrize(
    ("name", "shape", "others"),
    [
        ("align-prose-50.json", ([0], 30, 24), ()),
        ("align-hard.json", ([0, 6, 12, 18], 24, 48), (("random", "random"), ("Top-K", "topk_reward"))),
    ],
)
def test_what_the_page_says_of_alignment_elsewhere(name, shape, others):
    """After training, and in the hard world."""
    found = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert (found["policies"], found["pools"], found["budget"]) == shape

    def less(name):
        one, full = (found["methods"][each]["by_singleton"]["raw"] for each in (name, "grpo_full"))
        if one is full:  # the jackknife's at each policy, and that policies have the pools of the same questions
            values = np.reshape(one["values"], (len(found["policies"]), -1))
            alone = np.linalg.norm(values.std(axis=1, ddof=1)) / len(values)
            together = values.mean(axis=0).std(ddof=1) / alone
            error = np.linalg.norm(one["errors"]) / len(one["errors"]) * together
            return f"{values.mean():.3f} ± {2 * error:.3f}"
        values = np.reshape(np.array(one["values"]) - np.array(full["values"]), (len(found["policies"]), -1)).mean(0)
        return f"{values.mean():+.3f} ± {2 * values.std(ddof=1) / len(values) ** 0.5:.3f}"

    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for said, of in (
        ("GRPO-Full's cosine is", "grpo_full"),
        ("minus it SDGA-Phase", "sdga_phase"),
        ("Auto", "sdga_auto"),
        ("Anti", "sdga_anti"),
        ("random siblings", "random_siblings"),
        ("of mixed groups SDGA-Phase", "sdga_phase/mixed"),
        ("random siblings", "random_siblings/mixed"),
        *others,
    ):
        assert f"{said} {less(of)}" in page


def test_what_the_pages_say_of_the_real_model():
    plan, tables = planned("depth-first-lm"), Tables.read(STUDIES["depth-first-lm"])
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    of = tables.runs.set_index("run")
    found, after = {}, {}
    for run in plan.of("third"):
        if tables.statuses.get(run.id) != "done":
            continue
        key = run.config.method.mixed_groups_only, run.seed
        row = of.loc[run.id]
        found.setdefault(key, {})[run.config.method.name] = f"{row['em_last']:.2f}, {row['depth_last']:.1f}"
        answers = tables.answers_of(run)
        known = answers[answers["needed"] == 0].groupby("version")["em"].mean()
        after[*key, run.config.method.name] = known.iloc[-1]
        assert f"{row['em_first']:.2f} {known.iloc[0]:.2f}" == "0.43 0.97"
    for seed in {seed for _, seed in found}:
        arms = [(is_mixed, name) for is_mixed in (True, False) for name in ("sdga_phase", "random_siblings")]
        cells = [found.get((is_mixed, seed), {}).get(name, "–") for is_mixed, name in arms]
        assert f"| {seed} | {' | '.join(cells)} |" in page
    assert len(after) == len(plan.runs) == 20
    report = (STUDIES["depth-first-lm"] / "report.md").read_text(encoding="utf-8")
    for where, said in (
        ("not mixed_groups_only", "of all groups by {}, which leans against it (p {}, Holm's {})"),
        ("mixed_groups_only", "of mixed groups by {}, where nothing is seen"),
    ):
        row = re.search(rf"^\| SDGA-Phase beats .* \| {where} \| 5 of 5 \| (.*)$", report, re.MULTILINE)
        assert row
        effect, p, holm, *_, verdict = row[1].removesuffix(" |").split(" | ")
        assert verdict == ("leans against it" if "not" in where else "not seen")
        assert said.format(effect, p, holm) in page
    em = {run.id: of.loc[run.id]["em_last"] for run in plan.of("third") if tables.statuses.get(run.id) == "done"}
    ends = {
        (run.config.method.mixed_groups_only, run.seed, run.config.method.name): em[run.id]
        for run in plan.of("third")
        if run.id in em
    }
    less = [ends[*key, "sdga_phase"] - ends[*key, "random_siblings"] for key, one in found.items() if len(one) == 2]
    below = f"in {sum(one < 0 for one in less)} of {len(less)} pairs, by {-np.mean(less):.2f} in the mean"
    assert f"SDGA-Phase ends below the siblings {below}" in page
    depth_first, siblings = (
        sorted(known for (*_, name), known in after.items() if name == method)
        for method in ("sdga_phase", "random_siblings")
    )
    searching = [known for known in depth_first if known < siblings[0]]
    of_runs = f"{len(searching)} of its {len(depth_first)} runs"
    assert f"In {of_runs} SDGA-Phase searches for everything" in page
    assert f"right before, at most {searching[-1]:.2f} after; with siblings {siblings[0]:.2f} to" in page
    assert f"{siblings[-1]:.2f}." in page
    of_pairs = f"and so do {sum(one < 0 for one in less)} of {len(less)} pairs of runs"
    assert of_pairs in " ".join((PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("folder", STUDIES.values(), ids=STUDIES)
def test_no_number_is_a_negative_zero(folder):
    assert re.findall(r"\| -0\.0+ \|", (folder / "report.md").read_text(encoding="utf-8")) == []


def test_failed_runs_are_named_in_the_report(tables):
    report = (FOLDER / "report.md").read_text()
    assert [run for run, status in tables.statuses.items() if status == "failed" and f"- {run}:" not in report] == []


def test_the_hard_world_can_tell_methods_apart(tables, steps):
    """What `configs/atlas-hard.toml` is for: room to learn, rewards that differ, every depth."""
    runs = tables.runs.set_index("run")
    full = [run for run in dict.fromkeys(steps["run"]) if runs.loc[run, "method.name"] == "grpo_full"]
    assert runs.loc[full, "em_first"].between(0.2, 0.4).all()
    assert runs.loc[full, "em_last"].mean() > 0.6
    middle = steps[steps["step"].isin(MIDDLE)]
    flat = middle.groupby("method.name")["groups/zero_variance_share"].mean()
    assert flat["grpo_full"] < 0.4
    depths = np.array([json.loads(depths) for depths in middle["depth/generated"]]).sum(axis=0)
    assert (depths > 0.02 * depths.sum()).all()


def write_table():
    before, rest = PAGE.read_text(encoding="utf-8").split(f"| {METHODS[0]} | {METHODS[1]} |", 1)
    text = before + methods_table() + rest[rest.index("\n\n") + 1 :]
    done = re.compile(r"\d+\s+of\s+\d+\s+runs\s+are\s+done.*?\s+in\s+all\.", re.DOTALL)
    PAGE.write_text(done.sub(runs_done(), text), encoding="utf-8")


if __name__ == "__main__":
    write_table()
