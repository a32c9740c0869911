"""The report of a study, from its tables alone: report.md and its figures.

First the claims of the study, then for each part: held-out curves, a table of the measures with intervals, the
differences to the baseline, the costs. Failed runs are named; a combination with fewer than two seeds has no
interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cusearch_async.files import write_whole
from cusearch_async.metrics.drawing import pyplot
from cusearch_async.study.claims import outcomes_of
from cusearch_async.study.plan import Part, Plan
from cusearch_async.study.statistics import Difference, Estimate, Matrix, contributions, corrected, difference, estimate
from cusearch_async.study.tables import Tables

HOW = """Intervals are of 95 %, by hierarchical bootstrap over seeds and questions; p-values of paired t-tests over
seeds, Holm's over the rows of a table. *Detectable* is the true difference that so many seeds would have shown with a
probability of 0.8. *Over-search* is the mean number of searches beyond those that a question needs."""
CLAIMS = """A claim *holds*, or *the opposite holds*, where Holm's p over the claims of its table is at most 0.05; where
only its own p is, it *leans* that way."""
NAMES = {
    "em_last": "EM after the last step",
    "em_area": "mean EM over the run",
    "depth_growth": "growth of depth over the run",
}
SECONDARY = {
    "em_sampled": "sampled EM, last fifth",
    "depth_last": "depth",
    "over_search": "over-search",
}
COSTS = {
    "trajectories": ("trajectories", 1),
    "trained": ("trained", 1),
    "trained_tokens": ("trained tokens, thousands", 1000),
    "wall_s": ("seconds", 1),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of settings in a part, with the runs of all its seeds."""

    name: str
    """Its settings among those that tell the baseline from the others."""
    context: str
    """The settings that it shares with its baseline."""
    is_baseline: bool
    runs: pd.DataFrame

    @property
    def done(self) -> pd.DataFrame:
        return self.runs[self.runs["status"] == "done"].sort_values("seed")


def variants_of(part: Part, plan: Plan, tables: Tables) -> list[Variant]:
    """The combinations of a part, in the order of the plan."""
    planned = plan.of(part.name)
    known = tables.runs.set_index("run", drop=False)
    rows = known.loc[[run.id for run in planned if run.id in known.index]]
    shown = plan.differing(part.name) or list(plan.varied[:1])
    baseline = part.baseline or plan.study.baseline
    found = []
    for values, runs in rows.groupby(shown, sort=False):
        settings = dict(zip(shown, values, strict=True))
        context = {key: value for key, value in settings.items() if key not in baseline}
        own = {key: value for key, value in settings.items() if key in baseline}
        is_baseline = all(str(settings.get(key, value)) == str(value) for key, value in baseline.items())
        found.append(Variant(_said(own or settings), _said(context), is_baseline, runs))
    return found


def _said(settings: Mapping[str, Any]) -> str:
    """Methods by their names, other settings with the last part of their key."""
    texts = [str(v) if k == "method.name" else f"{k.split('.')[-1]} {v}" for k, v in settings.items()]
    return ", ".join(texts)


def matrix(variant: Variant, measure: str, tables: Tables) -> Matrix:
    """[seeds, questions] of the runs that are done, by seed."""
    answers = tables.answers
    by_run = dict(tuple(answers[answers["run"].isin(variant.done["run"])].groupby("run")))
    return np.array([contributions(by_run[run], measure) for run in variant.done["run"]])


def compare(variant: Variant, baseline: Variant, measure: str, tables: Tables) -> Difference | None:
    """Over the seeds that both have; None without any."""
    shared = sorted(set(variant.done["seed"]) & set(baseline.done["seed"]))
    if not shared:
        return None
    first, second = (
        matrix(Variant(v.name, v.context, v.is_baseline, v.runs[v.runs["seed"].isin(shared)]), measure, tables)
        for v in (variant, baseline)
    )
    return difference(first, second)


def write_report(plan: Plan, tables: Tables, folder: Path) -> Path:
    """Write report.md and its figures into `folder`; returns its path."""
    parts = []
    for part in plan.parts:
        variants = variants_of(part, plan, tables)
        if variants:
            parts.append(_part(part, plan, variants, tables, folder))
    planned = tables.runs[tables.runs["run"].isin(plan.runs)]
    done, failed = (planned[planned["status"] == status] for status in ("done", "failed"))
    hours = planned["wall_s"].sum() / 3600
    head = (
        f"# {plan.study.name}\n\n{len(done)} of {len(plan.runs)} runs are done, {len(failed)} failed; "
        f"{hours:.1f} hours in all. {HOW}\n"
    )
    failures = "".join(f"- {row['run']}: {row['reason']}\n" for _, row in failed.iterrows())
    path = folder / "report.md"
    text = head + (f"\nFailed runs:\n\n{failures}" if failures else "") + _claims(plan, tables) + "".join(parts)
    write_whole(path, text.encode())
    return path


def _claims(plan: Plan, tables: Tables) -> str:
    text = f"\n## Claims\n\n{CLAIMS}\n" if plan.claims else ""
    for measure, tested in outcomes_of(plan, tables).items():
        rows = [
            [one.claim.text, _said(dict(one.context)), *_difference_cells(one.found), one.verdict] for one in tested
        ]
        text += f"\nBy {NAMES[measure]}:\n"
        text += _table(["claim", "where", "seeds", "difference", "p", "Holm's p", "detectable", "verdict"], rows)
    return text


def _part(part: Part, plan: Plan, variants: Sequence[Variant], tables: Tables, folder: Path) -> str:
    text = f"\n## {part.name}\n"
    contexts = dict.fromkeys(variant.context for variant in variants)
    for number, context in enumerate(contexts):
        members = [variant for variant in variants if variant.context == context]
        figure = folder / f"{part.name}-{number}.png"
        draw_curves(members, tables, context or part.name, figure)
        text += f"\n### {context or 'all'}\n\n![held-out EM over learner steps]({figure.name})\n"
        text += _measures(members, plan, tables) + _differences(members, plan, tables)
    return text + _costs(variants)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _measures(variants: Sequence[Variant], plan: Plan, tables: Tables) -> str:
    rows = []
    for variant in variants:
        cells = [_shown(estimate(matrix(variant, measure, tables))) for measure in plan.study.primary]
        means = variant.done[list(SECONDARY)].mean()
        cells += [f"{means[name]:.3f}" for name in SECONDARY]
        rows.append([variant.name, f"{len(variant.done)} of {len(variant.runs)}", *cells])
    return _table(["", "seeds", *(NAMES[name] for name in plan.study.primary), *SECONDARY.values()], rows)


def _differences(variants: Sequence[Variant], plan: Plan, tables: Tables) -> str:
    baseline = next((variant for variant in variants if variant.is_baseline), None)
    others = [variant for variant in variants if not variant.is_baseline]
    if baseline is None or not others:
        return ""
    text = ""
    for measure in plan.study.primary:
        found = [(variant.name, compare(variant, baseline, measure, tables)) for variant in others]
        known = [(name, one) for name, one in found if one is not None]
        whole = corrected([one for _, one in known])
        rows = [[name, *_difference_cells(one)] for (name, _), one in zip(known, whole, strict=True)]
        text += f"\nLess {baseline.name}, {NAMES[measure]}:\n"
        text += _table(["", "seeds", "difference", "p", "Holm's p", "detectable"], rows)
    return text


def _difference_cells(one: Difference) -> list[str]:
    numbers = [f"{value:.3f}" if value is not None else "–" for value in (one.p, one.p_holm, one.detectable)]
    return [str(one.estimate.seeds), _shown(one.estimate, "+"), *numbers]


def _shown(one: Estimate, sign: str = "") -> str:
    if one.interval is None:
        return f"{one.mean:{sign}.3f} (no interval)" if one.seeds else "–"
    low, high = one.interval
    return f"{one.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _costs(variants: Sequence[Variant]) -> str:
    rows = []
    for variant in variants:
        means = variant.done[list(COSTS)].mean()
        label = ", ".join(dict.fromkeys(filter(None, (variant.context, variant.name))))
        rows.append([label, *(f"{means[name] / unit:.0f}" for name, (_, unit) in COSTS.items())])
    return "\nMean cost of a run:\n" + _table(["", *(name for name, _ in COSTS.values())], rows)


def _curves(variant: Variant, tables: Tables) -> Iterator[pd.Series]:
    """Of each seed: held-out EM by version."""
    for run in variant.done["run"]:
        of_run = tables.answers[tables.answers["run"] == run]
        yield of_run.groupby("version")["em"].mean()


def draw_curves(variants: Sequence[Variant], tables: Tables, title: str, path: Path) -> None:
    """Held-out EM over learner steps: the mean over seeds, with a band of one standard error."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), constrained_layout=True)
    colors = plt.get_cmap("tab20")(np.linspace(0, 1, 20))
    for color, variant in zip(np.tile(colors, (len(variants) // 20 + 1, 1)), variants, strict=False):
        curves = list(_curves(variant, tables))
        if not curves:
            continue
        frame = pd.DataFrame(curves)
        mean, error = frame.mean(), frame.sem().fillna(0.0)
        axes.plot(mean.index, mean, color=color, label=variant.name, linewidth=2.2 if variant.is_baseline else 1.3)
        axes.fill_between(mean.index, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("learner step")
    axes.set_ylabel("held-out EM, greedy")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)
