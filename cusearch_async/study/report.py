"""The report of a study, from its tables alone: report.md and its figures, first the claims, then each part."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from cusearch_async.errors import packages_of
from cusearch_async.files import write_file
from cusearch_async.study.claims import Outcome, outcomes_of
from cusearch_async.study.curves import CURVES, Curve, draw
from cusearch_async.study.plan import Part, Plan, PlannedRun, found_in
from cusearch_async.study.statistics import Estimate, estimate, holm
from cusearch_async.study.tables import Tables
from cusearch_async.study.variants import Variant, compare, compare_at_equal, matrix, said, usable_of, variants_of

with packages_of("study"):
    import pandas as pd

HOW = """Intervals are of 95 %, over seeds and questions; an interval leaves out 0 just where p is below 0.05. Holm's p
is over the rows of a table, those without data included. *Detectable* is the true effect that Holm's first step would
have found with a probability of 0.8. *EM* is exact match on held-out questions, greedy; *sampled EM* that of the
episodes played for training in the last fifth of the steps; *over-search* the mean number of searches beyond those that
a question needs; a trained trajectory is *usable* when two or more of its group were selected and their rewards differ,
so that it has a group-relative advantage. The bands of the figures are of each curve by itself; tests are of
differences, paired by seed and question. What is below the claims is exploratory: many tables, each corrected within
itself alone."""
CLAIMS = """A claim *holds*, or *the opposite holds*, where Holm's p over the claims of its table is at most 0.05; where
only its own p is, it *leans* that way; *not seen* is no refutation of what is smaller than *detectable*. There is no
verdict before all its runs are over, nor with fewer seeds than were planned. *Reported* is what the claim rests on, and
where it lies by the interval found here."""
NAMES = {
    "em_last": "EM after the last step",
    "em_area": "mean EM over the run",
    "depth_growth": "growth of depth over the run",
}
SECONDARY = {
    "em_first": "EM before",
    "em_sampled": "sampled EM",
    "depth_last": "depth",
    "depth_growth": "its growth",
    "over_search": "over-search",
}
COSTS = {
    "trajectories": ("trajectories", 1),
    "trained": ("trained", 1),
    "sampled_tokens": ("sampled tokens, thousands", 1000),
    "trained_tokens": ("trained tokens, thousands", 1000),
}
SECONDS = {"steps_s": "seconds of steps", "wall_s": "seconds in all"}
FIGURES = "figures"
"""Folder in that of the report; what is in it was made for the report."""


def write_report(plan: Plan, tables: Tables, folder: Path) -> Path:
    """Write report.md and its figures into `folder`. Returns its path."""
    figures = folder / FIGURES
    figures.mkdir(parents=True, exist_ok=True)
    for old in figures.glob("*.png"):
        old.unlink()
    for name, (curve, variants) in figures_of(plan, tables).items():
        draw(curve, variants, tables, figures / name)
    path = folder / "report.md"
    write_file(path, report_of(plan, tables).encode())
    return path


def report_of(plan: Plan, tables: Tables) -> str:
    """The text of report.md."""
    parts = [_part(part, plan, tables) for part in plan.parts]
    return _head(plan, tables) + _claims(plan, tables) + "".join(parts)


def figures_of(plan: Plan, tables: Tables) -> dict[str, tuple[Curve, list[Variant]]]:
    """By file name: the curve, and its runs."""
    return {
        _figure(part, context, curve): (curve, variants)
        for part in plan.parts
        for context, variants in variants_of(part, plan, tables).items()
        if any(variant.done for variant in variants)
        for curve in CURVES
    }


def _figure(part: Part, context: str, curve: Curve) -> str:
    words = [part.name, *context.replace(",", "").split(), *filter(None, [curve.name])]
    name = re.sub(r"[^\w.-]+", "-", "-".join(words))
    whole = json.dumps([part.name, context, curve.name]).encode()
    unlike = f"{name[:80]}-{xxhash.xxh3_64_hexdigest(whole)[:8]}"  # the part `a-depth` is no curve of the part `a`
    return (name if len(name.encode()) <= 100 and "-" not in part.name else unlike) + ".png"


def _head(plan: Plan, tables: Tables) -> str:
    rows = tables.of(list(plan.runs.values()))
    done, failed = (rows[rows["status"] == status] for status in ("done", "failed"))
    others = len(tables.runs) - len(rows)
    text = f"# {plan.study.name}\n\n{len(done)} of {len(plan.runs)} runs are done, {len(failed)} failed; "
    text += f"{rows['wall_s'].sum() / 3600:.1f} hours in all."
    text += f" {others} runs in the tables are not of this plan and do not count." if others else ""
    configs = ", ".join(map(str, plan.study.configs))
    steps, every = (
        " or ".join(map(str, sorted({found_in(run.config, key) for run in plan.runs.values()})))
        for key in ("run.steps", "eval.every")
    )
    text += (
        f" All are of `{configs}`, with {steps} learner steps; held-out questions are scored every {every} steps."
        f"\n\n{HOW}\n"
    )
    failures = "".join(f"- {row['run']}: {row['reason']}\n" for _, row in failed.iterrows())
    return text + (f"\nFailed runs:\n\n{failures}" if failures else "")


def _claims(plan: Plan, tables: Tables) -> str:
    text = f"\n## Claims\n\n{CLAIMS}\n" if plan.claims else ""
    for measure, tested in outcomes_of(plan, tables).items():
        rows = []
        for one in tested:
            cells = [one.claim.text, said(dict(one.context)), f"{one.found.seeds} of {one.planned}"]
            cells += [*_effect_cells(one.found, one.p_holm, len(tested), measure), reported(one), one.verdict]
            rows.append(cells)
        text += f"\nBy {NAMES[measure]}:\n"
        header = ["claim", "where", "seeds", "effect", "p", "Holm's p", "detectable", "reported", "verdict"]
        text += _table(header, rows)
    return text


def reported(one: Outcome) -> str:
    if one.reported is None:
        return "–"
    where = ""
    if one.found.interval is not None:
        low, high = one.found.interval
        where = ": above" if one.reported > high else ": below" if one.reported < low else ": inside"
    return f"{one.reported:+.3f}{where}"


def _part(part: Part, plan: Plan, tables: Tables) -> str:
    text = f"\n## {part.name}\n" + (f"\n{part.asks}\n" if part.asks else "")
    if part.settings:
        text += f"\nWith {said(part.settings)}.\n"
    for context, variants in variants_of(part, plan, tables).items():
        text += f"\n### {context}\n" if context else ""
        done = [variant for variant in variants if variant.done]
        if not done:
            text += "\nNo run is done yet.\n"
            continue
        for curve in CURVES:
            text += f"\n![{curve.upwards}, by {curve.across}]({FIGURES}/{_figure(part, context, curve)})\n"
        text += _measures(variants, plan, tables) + _differences(variants, plan, tables)
        text += _beside(part, variants, plan, tables)
        text += _by_need(done, tables) + _trained_on(done, tables) + _costs(done, tables)
        if "pool.max_staleness" in plan.differing(part.name):
            text += _off_policy(done, tables)
    return text


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n" + "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def _measures(variants: Sequence[Variant], plan: Plan, tables: Tables) -> str:
    rows = []
    for variant in variants:
        cells = [shown(estimate(matrix(variant.done, measure, tables))) for measure in plan.study.primary]
        means = tables.of(variant.done)[list(SECONDARY)].mean()
        rows.append([variant.name, variant.seeds, *cells, *(_number(means[name]) for name in SECONDARY)])
    return _table(["", "seeds", *(NAMES[name] for name in plan.study.primary), *SECONDARY.values()], rows)


def _differences(variants: Sequence[Variant], plan: Plan, tables: Tables) -> str:
    baseline = next((variant for variant in variants if variant.is_baseline), None)
    others = [variant for variant in variants if not variant.is_baseline]
    if baseline is None or not others:
        return ""
    text = ""
    for measure in plan.study.primary:
        found = [compare(variant.done, baseline.done, measure, tables) for variant in others]
        seeds = [f"{one.seeds} of {len(variant.planned)}" for one, variant in zip(found, others, strict=True)]
        text += f"\nLess {baseline.name}, {NAMES[measure]}:\n"
        text += _compared([variant.name for variant in others], seeds, found, measure)
    found = [compare_at_equal(variant.done, baseline.done, tables) for variant in others]
    text += f"\nLess {baseline.name}, EM at as many usable trajectories (of a pair, all of the one that has fewer):\n"
    return text + _compared([variant.name for variant in others], seeds, found, "em_last")


def _beside(part: Part, variants: Sequence[Variant], plan: Plan, tables: Tables) -> str:
    """Each run less the one of another part that differs from it in the settings of the part alone."""
    if not part.beside:
        return ""
    pairs = {name: plan.runs[other] for name, other in plan.pairs(part).items()}
    text = ""
    for measure in plan.study.primary:
        names, seeds, found = [], [], []
        for variant in variants:
            others = [pairs[run.id] for run in variant.planned if run.id in pairs]
            done = [run for run in others if tables.statuses.get(run.id) == "done"]
            found.append(compare(variant.done, done, measure, tables))
            names.append(variant.name)
            seeds.append(f"{found[-1].seeds} of {len(others)}")
        text += f"\nLess the same in {part.beside}, {NAMES[measure]}:\n" + _compared(names, seeds, found, measure)
    return text


def _compared(names: Sequence[str], seeds: Sequence[str], found: Sequence[Estimate], measure: str) -> str:
    rows = [
        [name, of, *_effect_cells(one, p_holm, len(found), measure)]
        for name, of, one, p_holm in zip(names, seeds, found, holm(found), strict=True)
    ]
    return _table(["", "seeds", "difference", "p", "Holm's p", "detectable"], rows)


def _effect_cells(one: Estimate, p_holm: float | None, tests: int, measure: str) -> list[str]:
    least = one.detectable(tests)
    seen = "> 1" if least is not None and least > 1 and measure != "depth_growth" else _number(least, 2)
    ps = ["<0.001" if p is not None and p < 0.001 else _number(p) for p in (one.p, p_holm)]
    return [shown(one, "+"), *ps, seen]


def shown(one: Estimate, sign: str = "") -> str:
    if one.interval is None:
        return f"{one.mean:{sign}.3f} (no interval)" if one.seeds else "–"
    low, high = one.interval
    return f"{one.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:z.{digits}f}"


def _by_need(variants: Sequence[Variant], tables: Tables) -> str:
    """EM after the last step, by the searches that a question needs, where that is known."""
    rows, needs = [], range(0)
    for variant in variants:
        answers = [tables.answers_of(run) for run in variant.done]
        last = np.concatenate([one[one["version"] == one["version"].max()][["needed", "em"]] for one in answers])
        needs = range(int(last[:, 0].max()) + 1)
        means = (last[last[:, 0] == n, 1].mean() if n in last[:, 0] else None for n in needs)
        rows.append([variant.name, *map(_number, means)])
    if not needs:
        return ""
    return "\nEM after the last step, by searches needed:\n" + _table(["", *map(str, needs)], rows)


def _trained_on(variants: Sequence[Variant], tables: Tables) -> str:
    """The pools and what was selected of them: at the end where it changes with training, else over all steps."""
    nothing = pd.Series(dtype=float)
    mass = "selection/singleton_mass"  # older tables lack it
    of_newer_runs = {mass: "weight of those alone"} if mass in tables.steps else {}
    rows = []
    for variant in variants:
        steps = [tables.steps_of(run).sort_values("step") for run in variant.done]
        whole = pd.concat(steps)
        ends = pd.concat([one.tail(max(1, len(one) // 5)) for one in steps])
        first = pd.concat([one.head(1) for one in steps])
        means = [first["depth/mean"], ends["depth/mean"], ends["depth/mean_trained"], ends["reward/all"]]
        selected = whole["depth/selected"].map(json.loads).map(sum)
        shares = (whole["groups/singleton_share"], whole["groups/zero_variance_share"])
        means += [share * selected / selected.mean() for share in shares]  # of trajectories, however many a step has
        means += [ends.get("selection/phase", nothing)]
        means += [whole.get(name, nothing) for name in of_newer_runs]
        usable = float(np.mean([usable_of(run, tables).sum() for run in variant.done]))
        rows.append([variant.name, *(_number(float(one.mean()), 2) for one in means), _number(usable, 0)])
    header = ["", "depth at first", "depth at the end", "of what is trained", "reward at the end", "alone in its group"]
    header += ["groups of equal rewards", "phase at the end", *of_newer_runs.values(), "usable trajectories"]
    return "\nPools, and what was trained of them (the end: the last fifth of the steps):\n" + _table(header, rows)


def _costs(variants: Sequence[Variant], tables: Tables) -> str:
    rows = []
    for variant in variants:
        table = tables.of(variant.done)
        means, seconds = table[list(COSTS)].mean(), table[list(SECONDS)].median()
        updates = np.mean([_optimizer_steps(run, tables) for run in variant.done])
        cells = [_number(means[name] / unit, 0) for name, (_, unit) in COSTS.items()]
        cells += [_number(seconds[name], 0) for name in SECONDS]
        rows.append([variant.name, _number(float(updates), 0), *cells])
    header = ["", "optimizer steps", *(name for name, _ in COSTS.values()), *SECONDS.values()]
    text = "\nMean cost of a run (seconds: medians, which also depend on what else the machine did):\n"
    return text + _table(header, rows)


def _optimizer_steps(run: PlannedRun, tables: Tables) -> int:
    """One per mini-batch of what was selected."""
    selected = tables.steps_of(run)["depth/selected"].map(json.loads).map(sum)
    return int(np.ceil(selected / run.config.loss.minibatch).sum())


def _off_policy(variants: Sequence[Variant], tables: Tables) -> str:
    """What staleness does to the importance ratios, by search depth."""
    text = ""
    for column, name in (
        ("by_depth/mismatch_kl", "KL between the sampling and the trained policy, thousandths"),
        ("by_depth/ess", "effective sample size of the importance ratios"),
    ):
        rows, depths = [], 0
        for variant in variants:
            steps = [tables.steps_of(run) for run in variant.done]
            values = pd.DataFrame([json.loads(row) for one in steps for row in one[column]], dtype=np.float64)
            means = values.mean() * (1000 if "kl" in column else 1)
            stale = float(np.mean([one["staleness/mean"].mean() for one in steps]))
            depths = len(means)
            rows.append([variant.name, _number(stale, 2), *(_number(value) for value in means)])
        text += f"\nBy search depth: {name}:\n"
        text += _table(["", "mean staleness", *map(str, range(depths))], rows)
    return text
